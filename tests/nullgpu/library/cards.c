/* The cards, and what CUDA tells of a device; an attribute that is not named here is 0. All devices are the same card.
 * The rows have not been compared with cards, but for one number: cards of compute capability 12 refuse more than
 * 101,376 bytes of shared memory, as theirs here do (PyTorch's issue 198224). */
#include "nullgpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const Card CARDS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 85029158912, 232448, 233472, 2048, 52428800, 5120, 2619000, 1980000},
    {"h200", "NVIDIA H200", 9, 0, 132, 150109880320, 232448, 233472, 2048, 62914560, 6144, 3201000, 1980000},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 85097971712, 166912, 167936, 2048, 41943040, 5120, 1593000, 1410000},
    {"b200", "NVIDIA B200", 10, 0, 148, 191514869760, 232448, 233472, 2048, 132644864, 8192, 3996000, 1965000},
    {"4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 25250627584, 101376, 102400, 1536, 75497472, 384, 10501000, 2520000},
    {"l4", "NVIDIA L4", 8, 9, 58, 23580639232, 101376, 102400, 1536, 50331648, 192, 6251000, 2040000},
    {"l40s", "NVIDIA L40S", 8, 9, 142, 47711191040, 101376, 102400, 1536, 100663296, 384, 9001000, 2520000},
    {"3090", "NVIDIA GeForce RTX 3090", 8, 6, 82, 25296961536, 101376, 102400, 1536, 6291456, 384, 9751000, 1695000},
    {"a10g", "NVIDIA A10G", 8, 6, 80, 23609475072, 101376, 102400, 1536, 6291456, 384, 6251000, 1710000},
    {"5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, 33668988928, 101376, 102400, 1536, 100663296, 512, 14001000,
     2407000},
    {"t4", "Tesla T4", 7, 5, 40, 15642329088, 65536, 65536, 1024, 4194304, 256, 5001000, 1590000},
};

/* Attribute, field of cudaDeviceProp, value. The driver's attributes have the runtime's numbers. */
// clang-format off
#define FACTS(FACT)                                                                                \
  FACT(MaxThreadsPerBlock, maxThreadsPerBlock, MAX_THREADS)                                        \
  FACT(MaxBlockDimX, maxThreadsDim[0], 1024)                                                       \
  FACT(MaxBlockDimY, maxThreadsDim[1], 1024)                                                       \
  FACT(MaxBlockDimZ, maxThreadsDim[2], 64)                                                         \
  FACT(MaxGridDimX, maxGridSize[0], 2147483647)                                                    \
  FACT(MaxGridDimY, maxGridSize[1], 65535)                                                         \
  FACT(MaxGridDimZ, maxGridSize[2], 65535)                                                         \
  FACT(MaxSharedMemoryPerBlock, sharedMemPerBlock, DEFAULT_BLOCK_SHARED)                           \
  FACT(MaxSharedMemoryPerBlockOptin, sharedMemPerBlockOptin, card.block_shared)                    \
  FACT(MaxSharedMemoryPerMultiprocessor, sharedMemPerMultiprocessor, card.multiprocessor_shared)   \
  FACT(ReservedSharedMemoryPerBlock, reservedSharedMemPerBlock, 1024)                              \
  FACT(MaxRegistersPerBlock, regsPerBlock, MAX_REGISTERS)                                          \
  FACT(MaxRegistersPerMultiprocessor, regsPerMultiprocessor, MAX_REGISTERS)                        \
  FACT(MaxBlocksPerMultiprocessor, maxBlocksPerMultiProcessor, 32)                                 \
  FACT(MaxThreadsPerMultiProcessor, maxThreadsPerMultiProcessor, card.multiprocessor_threads)      \
  FACT(MultiProcessorCount, multiProcessorCount, card.multiprocessors)                             \
  FACT(ComputeCapabilityMajor, major, card.major)                                                  \
  FACT(ComputeCapabilityMinor, minor, card.minor)                                                  \
  FACT(GlobalMemoryBusWidth, memoryBusWidth, card.bus_width)                                       \
  FACT(L2CacheSize, l2CacheSize, card.l2_cache)                                                    \
  FACT(WarpSize, warpSize, 32)                                                                     \
  FACT(TextureAlignment, textureAlignment, 512)                                                    \
  FACT(UnifiedAddressing, unifiedAddressing, 1)                                                    \
  FACT(ConcurrentKernels, concurrentKernels, 1)                                                    \
  FACT(StreamPrioritiesSupported, streamPrioritiesSupported, 1)                                    \
  FACT(CooperativeLaunch, cooperativeLaunch, 1)                                                    \
  FACT(MemoryPoolsSupported, memoryPoolsSupported, 1)
// clang-format on

Card card;
int card_count = 1;
__thread int current_device;

__attribute__((constructor)) static void choose_card(void) {
  const char *key = getenv("NULLGPU_CARD"), *count = getenv("NULLGPU_COUNT");
  card = CARDS[0];
  for (size_t i = 0; key && i < sizeof CARDS / sizeof *CARDS; i++) {
    if (!strcmp(key, CARDS[i].key)) card = CARDS[i];
  }
  if (count) card_count = atoi(count);
}

#define AS_CASE(attribute, field, value)                                                                               \
  case cudaDevAttr##attribute: return value;

static int attribute(int which) {
  switch (which) {
    FACTS(AS_CASE)
  case cudaDevAttrClockRate: return card.clock;
  case cudaDevAttrMemoryClockRate: return card.memory_clock;
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
  default: return 0;
  }
}

#define AS_FIELD(attribute, field, value) properties->field = value;

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  FACTS(AS_FIELD)
  strcpy(properties->name, card.name);
  properties->uuid.bytes[0] = device + 1;
  properties->pciBusID = device + 1;
  properties->totalGlobalMem = card.memory;
  properties->totalConstMem = 65536;
  properties->persistingL2CacheMaxSize = card.l2_cache / 2;
  properties->asyncEngineCount = 3;
  properties->ECCEnabled = 1;
  properties->managedMemory = 1;
  properties->concurrentManagedAccess = 1;
  properties->canMapHostMemory = 1;
  properties->clusterLaunch = card.major >= 9;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  *value = attribute(which);
  return cudaSuccess;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = card_count;
  return cudaSuccess;
}

CUresult cuDeviceGetCount(int *count) {
  *count = card_count;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= card_count) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  return CUDA_SUCCESS;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDA_VERSION_SAID;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION_SAID;
  return CUDA_SUCCESS;
}
