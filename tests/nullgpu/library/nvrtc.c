/* NVRTC, by which torch compiles a few of its operations, such as prod. It takes any source and compiles nothing; what
 * it gives is no ELF file, which modules.c knows. torch 2.13 calls nvrtcCompileProgram of the real library all the
 * same, which crashes here: such operations cannot be tried. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>

enum { BINARY_SIZE = 64 };

int nvrtcVersion(int *major, int *minor) {
  *major = CUDA_VERSION_SAID / 1000;
  *minor = 0;
  return 0;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *names) {
  *program = malloc(1);
  return 0;
}

int nvrtcCompileProgram(void *program, int count, const char *const *options) {
  note(MODULE, "nvrtc compiles", 0, 0, 0, -1);
  return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *size) {
  *size = BINARY_SIZE;
  return 0;
}

int nvrtcGetCUBIN(void *program, char *binary) {
  strncpy(binary, "null", BINARY_SIZE);
  return 0;
}

int nvrtcGetPTXSize(void *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(void *program, char *binary) { return nvrtcGetCUBIN(program, binary); }

int nvrtcGetProgramLogSize(void *program, size_t *size) {
  *size = 1;
  return 0;
}

int nvrtcGetProgramLog(void *program, char *text) {
  *text = 0;
  return 0;
}

int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  *name = "jitted";
  return 0;
}
