/* Kernels that libraries bring: nvcc's code registers each, so a launch has a name. Launches are checked against the
 * limits of every kernel (grid, block, shared memory); registers and occupancy of these kernels are not known. */
#include "nullgpu.h"
#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const void *stub; /* the function of the host whose address stands for the kernel */
  const char *name;
} Kernel;

typedef struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} Call;

enum { MAX_CALL_DEPTH = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *kernels;
static __thread Call calls[MAX_CALL_DEPTH];
static __thread int call_depth;

static int by_stub(const void *a, const void *b) {
  const Kernel *left = a, *right = b;
  return (left->stub > right->stub) - (left->stub < right->stub);
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}

void __cudaRegisterFunction(void **handle, const char *stub, char *device_stub, const char *name, int thread_limit,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp_size) {
  Kernel *kernel = malloc(sizeof *kernel);
  *kernel = (Kernel){stub, name};
  pthread_mutex_lock(&lock);
  Kernel **found = tsearch(kernel, &kernels, by_stub);
  if (*found != kernel) { /* a library that was loaded where another had been */
    (*found)->name = name;
    free(kernel);
  }
  pthread_mutex_unlock(&lock);
}

static const char *kernel_name(const void *stub) {
  pthread_mutex_lock(&lock);
  Kernel **found = tfind(&(Kernel){stub, 0}, &kernels, by_stub);
  pthread_mutex_unlock(&lock);
  return found ? (*found)->name : "?";
}

/* launch: blocks, threads of a block, shared memory, whether it is captured; for a refused one "REFUSED" and the size,
 * then the name and -1. */
cudaError_t launch(const char *kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  int64_t blocks = (int64_t)grid.x * grid.y * grid.z, threads = (int64_t)block.x * block.y * block.z;
  int grid_fits = blocks && grid.y <= 65535 && grid.z <= 65535;
  int block_fits = threads && block.x <= MAX_THREADS && block.y <= MAX_THREADS && block.z <= 64;
  if (!grid_fits || !block_fits || threads > MAX_THREADS || shared > (size_t)card.block_shared) {
    note(LAUNCH, "REFUSED", grid.x, grid.y, grid.z, shared);
    note(LAUNCH, kernel, -1, grid.y, grid.z, shared);
    return fail(cudaErrorInvalidConfiguration);
  }
  cudaError_t error = add_node(stream, 1);
  if (!error) note(LAUNCH, kernel, blocks, threads, shared, is_captured(stream));
  return error;
}

/* kernel<<<grid, block, shared, stream>>>() pushes, calls the stub, and the stub pops and launches. */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  calls[call_depth++] = (Call){grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  const Call *call = &calls[--call_depth];
  *grid = call->grid;
  *block = call->block;
  *shared = call->shared;
  *(cudaStream_t *)stream = call->stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return launch(kernel_name(stub), grid, block, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch(kernel_name(stub), grid, block, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **arguments) {
  return launch(kernel_name(stub), config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
  *kernel = (cudaKernel_t)stub;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return launch(kernel_name(kernel), grid, block, shared, stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = MAX_THREADS;
  attributes->numRegs = 32;
  int version = card.major * 10 + card.minor;
  /* PyTorch's builds have no code for 8.9, which runs that of 8.6; CUB refuses to sort for any other version. */
  attributes->ptxVersion = attributes->binaryVersion = version == 89 ? 86 : version;
  attributes->maxDynamicSharedSizeBytes = card.block_shared;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > card.block_shared) {
    note(LAUNCH, "REFUSED smem", value, 0, 0, 0);
    return fail(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                            int device) {
  return cudaFuncSetAttribute(kernel, attribute, value);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *stub, int block,
                                                                   size_t shared, unsigned flags) {
  int fit = card.multiprocessor_threads / (block ? block : 1);
  *count = fit > 32 ? 32 : fit < 1 ? 1 : fit;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *stub, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, stub, block, shared, 0);
}
