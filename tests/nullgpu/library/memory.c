/* Memory: a card's is address space of the process, never filled, and counted as the driver counts (steps of 2 MiB, 500
 * MiB for the context), so torch's allocator meets the card's real size. A process counts what it took
 * itself, not what others took of the same card. Pages that a copy or a memset touches are real until they are freed.
 */
#include "nullgpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_DEVICES = 64, HOST_PAGE = 4096, CARD_PAGE = 2 << 20, CONTEXT_BYTES = 500 << 20 };

typedef struct Block {
  char *start;
  size_t size;
  int device;
  struct Block *next;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *card_blocks, *pinned_blocks;
static size_t used[MAX_DEVICES], peak[MAX_DEVICES];

/* For Python, of device 0. */
size_t nullgpu_peak(void) { return peak[0]; }
size_t nullgpu_used(void) { return used[0]; }
void nullgpu_reset_peak(void) { peak[0] = used[0]; }

static size_t rounded_up(size_t size, size_t step) { return (size + step - 1) / step * step; }

static void *address_space(size_t size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *start = mmap(0, size ? size : HOST_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
  return start == MAP_FAILED ? 0 : start;
}

static void add_block(Block **list, void *start, size_t size) {
  Block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (Block){start, size, current_device, *list};
  *list = block;
  pthread_mutex_unlock(&lock);
}

/* Takes the block that starts there off the list; without one, a block of no size. */
static Block remove_block(Block **list, const void *start) {
  Block removed = {0};
  pthread_mutex_lock(&lock);
  while (*list && (*list)->start != start)
    list = &(*list)->next;
  if (*list) {
    Block *block = *list;
    removed = *block;
    *list = block->next;
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return removed;
}

static Block block_around(Block *const *list, const void *address) {
  const char *at = address;
  pthread_mutex_lock(&lock);
  Block *block = *list;
  while (block && (at < block->start || at >= block->start + block->size))
    block = block->next;
  Block found = block ? *block : (Block){0};
  pthread_mutex_unlock(&lock);
  return found;
}

int is_on_card(const void *address) { return block_around(&card_blocks, address).size != 0; }
int is_pinned(const void *address) { return block_around(&pinned_blocks, address).size != 0; }

/* Counts bytes as used, if the card has them. */
static int take_bytes(size_t size) {
  pthread_mutex_lock(&lock);
  size_t *now = &used[current_device], *most = &peak[current_device];
  int fits = *now + size + CONTEXT_BYTES <= card.memory;
  if (fits) *now += size;
  if (*now > *most) *most = *now;
  pthread_mutex_unlock(&lock);
  return fits;
}

static void give_bytes(int device, size_t size) {
  pthread_mutex_lock(&lock);
  used[device] -= size;
  pthread_mutex_unlock(&lock);
}

/* malloc: bytes asked for, bytes of the card in use; -1 where they do not fit. */
cudaError_t cudaMalloc(void **start, size_t size) {
  cudaError_t error = refuse_in_capture("cudaMalloc");
  if (error) return error;
  size = rounded_up(size, 512);
  size_t taken = rounded_up(size, CARD_PAGE);
  int fits = take_bytes(taken);
  *start = fits ? address_space(taken) : 0;
  if (!*start) {
    if (fits) give_bytes(current_device, taken);
    note(MALLOC, "cudaMalloc", size, -1, 0, 0);
    return fail(cudaErrorMemoryAllocation);
  }
  add_block(&card_blocks, *start, taken);
  note(MALLOC, "cudaMalloc", size, used[current_device], 0, 0);
  return cudaSuccess;
}

/* free: bytes, bytes of the card still in use. It waits for the device, so it is a sync too. */
cudaError_t cudaFree(void *start) {
  if (!start) return cudaSuccess;
  cudaError_t error = refuse_in_capture("cudaFree");
  if (error) return error;
  Block block = remove_block(&card_blocks, start);
  if (block.size) {
    give_bytes(block.device, block.size);
    munmap(block.start, block.size);
    note(FREE, "cudaFree", block.size, used[block.device], 0, 0);
  }
  note(SYNC, "cudaFree", 0, 0, 0, 0);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return cudaMalloc(start, size); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }
cudaError_t cudaMallocManaged(void **start, size_t size, unsigned flags) { return cudaMalloc(start, size); }

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  *total = card.memory;
  *left = card.memory - used[current_device] - CONTEXT_BYTES;
  return cudaSuccess;
}

/* A variable of a kernel: all share one address. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  static void *variable;
  if (!variable) cudaMalloc(&variable, 1 << 20);
  *address = variable;
  return cudaSuccess;
}

/* ---- pinned memory of the host ---- */

/* host: bytes. */
cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
  cudaError_t error = refuse_in_capture("cudaHostAlloc");
  if (error) return error;
  size = rounded_up(size, HOST_PAGE);
  *start = address_space(size);
  if (!*start) return fail(cudaErrorMemoryAllocation);
  add_block(&pinned_blocks, *start, size);
  note(HOST, "cudaHostAlloc", size, 0, 0, 0);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *start) {
  Block block = remove_block(&pinned_blocks, start);
  if (block.size) munmap(block.start, block.size);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
  add_block(&pinned_blocks, start, size);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *start) {
  remove_block(&pinned_blocks, start);
  return cudaSuccess;
}

/* ---- whose memory is it ---- */

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  Block block = block_around(&card_blocks, address);
  int pinned = !block.size && is_pinned(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->device = block.device;
  attributes->type = block.size ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->devicePointer = block.size || pinned ? (void *)address : 0;
  attributes->hostPointer = block.size ? 0 : (void *)address;
  return cudaSuccess;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
  int on_card = is_on_card((void *)address);
  switch (which) {
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)&card; break;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(int *)value = on_card ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
  default: *(int *)value = 0;
  }
  return on_card || is_pinned((void *)address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
  Block block = block_around(&card_blocks, (void *)address);
  if (!block.size) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = (CUdeviceptr)block.start;
  if (size) *size = block.size;
  return CUDA_SUCCESS;
}

/* ---- memory pools: there are none, so they hold nothing ---- */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  *pool = (cudaMemPool_t)&card;
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
  *(uint64_t *)value = 0;
  return cudaSuccess;
}

/* ---- expandable segments: addresses and memory apart ----
 * A handle of memory is its size. torch 2.13 asks NVML before it maps, which the null GPU does not have, and crashes.
 */

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
  *size = CARD_PAGE;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  void *made = address_space(size);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  add_block(&card_blocks, made, size);
  *start = (CUdeviceptr)made;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
  Block block = remove_block(&card_blocks, (void *)start);
  if (block.size) munmap(block.start, block.size);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  if (!take_bytes(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = size;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  give_bytes(current_device, handle);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
  madvise((void *)start, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
