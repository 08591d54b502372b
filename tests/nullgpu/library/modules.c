/* Modules: kernels that Triton and NVRTC compile at run time. Registers, stack and shared memory are read from the
 * cubin, so they are what ptxas really gave, and a launch that the card could not hold is refused as on the card (which
 * rounds registers up; this does not). What is no ELF file, such as what nvrtc.c gives, has every function asked for.
 */
#include "nullgpu.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char name[512];
  int registers, stack, shared, asked_shared;
} Function;

enum { NO_ARCHITECTURE = -1 };

typedef struct {
  Function *functions;
  int count, architecture;
} Module;

typedef struct {
  const unsigned char *bytes;
  const Elf64_Ehdr *header;
  const Elf64_Shdr *sections;
  const char *section_names;
  const Elf64_Sym *symbols;
  const char *symbol_names;
} Cubin;

/* ---- reading a cubin ---- */

static Cubin open_cubin(const unsigned char *bytes) {
  Cubin cubin = {.bytes = bytes, .header = (const void *)bytes};
  cubin.sections = (const void *)(bytes + cubin.header->e_shoff);
  cubin.section_names = (const char *)bytes + cubin.sections[cubin.header->e_shstrndx].sh_offset;
  for (int i = 0; i < cubin.header->e_shnum; i++) {
    const Elf64_Shdr *section = &cubin.sections[i];
    if (section->sh_type != SHT_SYMTAB) continue;
    cubin.symbols = (const void *)(bytes + section->sh_offset);
    cubin.symbol_names = (const char *)bytes + cubin.sections[section->sh_link].sh_offset;
  }
  return cubin;
}

static int architecture_of(const Elf64_Ehdr *header) {
  int shift = header->e_ident[EI_ABIVERSION] >= 8 ? 8 : 0;
  return header->e_flags >> shift & 0xff;
}

static Function *function_of(const Module *module, const char *name) {
  for (int i = 0; i < module->count; i++) {
    if (!strcmp(module->functions[i].name, name)) return &module->functions[i];
  }
  return 0;
}

static void add_function(Module *module, const char *name) {
  module->functions = realloc(module->functions, (module->count + 1) * sizeof *module->functions);
  Function *added = &module->functions[module->count++];
  *added = (Function){0};
  snprintf(added->name, sizeof added->name, "%s", name);
}

/* .nv.info is a row of attributes: a format, a kind, 16 bits; in format 4 these are the size of what follows, which for
 * the two kinds below is the number of a function's symbol and a value. */
static void read_info(const Module *module, const Cubin *cubin, const Elf64_Shdr *section) {
  enum { SIZED = 4, STACK = 0x11, REGISTERS = 0x2f };
  const unsigned char *at = cubin->bytes + section->sh_offset, *end = at + section->sh_size;
  while (at + 4 <= end) {
    int format = at[0], kind = at[1];
    uint16_t size;
    memcpy(&size, at + 2, sizeof size);
    at += 4;
    if (format != SIZED) continue;
    uint32_t pair[2];
    if (size >= sizeof pair && (kind == STACK || kind == REGISTERS)) {
      memcpy(pair, at, sizeof pair);
      Function *function = function_of(module, cubin->symbol_names + cubin->symbols[pair[0]].st_name);
      if (function) *(kind == STACK ? &function->stack : &function->registers) = pair[1];
    }
    at += size;
  }
}

/* The rest of a section's name after a prefix, or null. */
static const char *after(const char *prefix, const char *name) {
  size_t length = strlen(prefix);
  return strncmp(name, prefix, length) ? 0 : name + length;
}

static Module *read_module(const unsigned char *bytes) {
  Module *module = calloc(1, sizeof *module);
  module->architecture = NO_ARCHITECTURE;
  if (memcmp(bytes, ELFMAG, SELFMAG)) return module;
  Cubin cubin = open_cubin(bytes);
  module->architecture = architecture_of(cubin.header);
  for (int i = 0; i < cubin.header->e_shnum; i++) {
    const char *function = after(".text.", cubin.section_names + cubin.sections[i].sh_name);
    if (function) add_function(module, function);
  }
  for (int i = 0; i < cubin.header->e_shnum; i++) {
    const char *name = cubin.section_names + cubin.sections[i].sh_name, *owner = after(".nv.shared.", name);
    Function *function = owner ? function_of(module, owner) : 0;
    if (function) function->shared = cubin.sections[i].sh_size;
    if (!strcmp(name, ".nv.info") && cubin.symbols) read_info(module, &cubin, &cubin.sections[i]);
  }
  return module;
}

/* ---- loading ---- */

/* module: registers, bytes of stack a thread, static shared memory, architecture; a line for each function. */
CUresult cuModuleLoadData(CUmodule *module, const void *bytes) {
  Module *made = read_module(bytes);
  int architecture = card.major * 10 + card.minor;
  for (int i = 0; i < made->count; i++) {
    const Function *function = &made->functions[i];
    note(MODULE, function->name, function->registers, function->stack, function->shared, made->architecture);
  }
  if (made->architecture > 0 && made->architecture != architecture) {
    fprintf(stderr, "nullgpu: cubin for sm_%d on sm_%d\n", made->architecture, architecture);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *bytes, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, bytes);
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(file, 0, SEEK_END);
  size_t size = ftell(file);
  rewind(file);
  void *bytes = malloc(size);
  int is_whole = fread(bytes, 1, size, file) == size;
  fclose(file);
  CUresult result = is_whole ? cuModuleLoadData(module, bytes) : CUDA_ERROR_FILE_NOT_FOUND;
  free(bytes);
  return result;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Module *at = (Module *)module;
  Function *found = function_of(at, name);
  if (!found && at->architecture == NO_ARCHITECTURE) {
    Module made = {0};
    add_function(&made, name);
    found = made.functions;
    found->registers = 32;
  }
  *function = (CUfunction)found;
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *bytes, enum cudaJitOption *jit_options,
                                void **jit_values, unsigned jit_count, enum cudaLibraryOption *options, void **values,
                                unsigned count) {
  return cuModuleLoadData((CUmodule *)library, bytes) ? fail(cudaErrorNoKernelImageForDevice) : cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  CUresult result = cuModuleGetFunction((CUfunction *)kernel, (CUmodule)library, name);
  return result ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

/* ---- functions and their launches ---- */

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  const Function *at = (Function *)function;
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = at->registers; break;
  case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = at->stack; break;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = at->shared; break;
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = MAX_THREADS; break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = card.block_shared; break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value > card.block_shared) return CUDA_ERROR_INVALID_VALUE;
  ((Function *)function)->asked_shared = value;
  return CUDA_SUCCESS;
}

static CUresult launch_function(CUfunction function, dim3 grid, dim3 block, size_t shared, CUstream stream) {
  const Function *at = (Function *)function;
  size_t threads = (size_t)block.x * block.y * block.z;
  size_t shared_limit = at->asked_shared ? card.block_shared : DEFAULT_BLOCK_SHARED;
  if (threads * at->registers > MAX_REGISTERS || shared + at->shared > shared_limit) {
    note(LAUNCH, "REFUSED", at->registers, threads, shared, 0);
    fprintf(stderr, "nullgpu: %s refused: %d registers, %zu threads, %zu bytes shared\n", at->name, at->registers,
            threads, shared);
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  }
  return launch(at->name, grid, block, shared, stream) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
  return launch_function(function, (dim3){grid_x, grid_y, grid_z}, (dim3){block_x, block_y, block_z}, shared, stream);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **arguments) {
  return launch_function(function, (dim3){grid_x, grid_y, grid_z}, (dim3){block_x, block_y, block_z}, shared, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return launch_function(function, (dim3){config->gridDimX, config->gridDimY, config->gridDimZ},
                         (dim3){config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes,
                         config->hStream);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = card.multiprocessors;
  return CUDA_SUCCESS;
}
