/* The driver's contexts, of which there is one, always current; and its functions by their names, which is how torch
 * finds them. A name that the null GPU does not have is not found, as with an older driver. */
#include "nullgpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  if (flags) *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&card;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

/* The newest version of a function, since callers ask by the name of the first. */
static void *driver_function(const char *name) {
  const char *path = getenv("NULLGPU_SO");
  void *library = path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : 0;
  void *found = 0;
  for (int version = 3; version >= 1 && !found; version--) {
    char versioned[256];
    snprintf(versioned, sizeof versioned, version > 1 ? "%s_v%d" : "%s", name, version);
    found = dlsym(library ? library : RTLD_DEFAULT, versioned);
  }
  return found;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
