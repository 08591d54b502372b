/* Errors: the runtime remembers the last one of each thread. Only those that the null GPU gives have a text. */
#include "nullgpu.h"
#include <stdio.h>
#include <stdlib.h>

static const struct {
  int error;
  const char *text;
} TEXTS[] = {
    {cudaSuccess, "no error"},
    {cudaErrorInvalidValue, "invalid argument"},
    {cudaErrorMemoryAllocation, "out of memory"},
    {cudaErrorInvalidDevice, "invalid device ordinal"},
    {cudaErrorInvalidConfiguration, "invalid configuration argument"},
    {cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"},
    {cudaErrorLaunchOutOfResources, "too many resources requested for launch"},
    {cudaErrorNotSupported, "operation not supported"},
    {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream"},
    {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"},
};

static __thread cudaError_t last_error;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  if (getenv("NULLGPU_TRACE")) fprintf(stderr, "nullgpu: error %d\n", error);
  return error;
}

const char *error_text(int error) {
  for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++) {
    if (TEXTS[i].error == error) return TEXTS[i].text;
  }
  return "error of the null GPU";
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) { return error_text(error); }
const char *cudaGetErrorName(cudaError_t error) { return error_text(error); }

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error_text(error);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }
