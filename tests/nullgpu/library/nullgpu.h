/* What the files of the null GPU share.
 *
 * The null GPU is a library for LD_PRELOAD which stands in for CUDA's runtime, driver, cuBLAS, cuSOLVER, NVRTC and NCCL
 * on a machine without a card. Kernels compute nothing. Everything else is real: torch's CUDA build takes its CUDA
 * paths, its caching allocator divides a card's memory, Triton compiles with ptxas for the card's limits, captures obey
 * CUDA's rules, and every launch, copy and wait is in a log.
 *
 * All functions but the static ones and those declared here are exported, in place of CUDA's of the same name. */
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  const char *key, *name;
  int major, minor, multiprocessors;
  size_t memory;
  int block_shared, multiprocessor_shared, multiprocessor_threads, l2_cache, bus_width, memory_clock, clock;
} Card;

typedef enum { LAUNCH, GEMM, COPY, SYNC, MALLOC, FREE, GRAPH, MARK, SET, HOST, NCCL, MODULE } Kind;

enum { CUDA_VERSION_SAID = 13000, DEFAULT_BLOCK_SHARED = 49152, MAX_THREADS = 1024, MAX_REGISTERS = 65536 };

#pragma GCC visibility push(hidden)

/* cards.c: the card of NULLGPU_CARD, how many there are of it, and the one that this thread works on. */
extern Card card;
extern int card_count;
extern __thread int current_device;

/* errors.c: fail() is what a refused call of the runtime returns; cudaGetLastError then gives it again. */
cudaError_t fail(cudaError_t error);
const char *error_text(int error);

/* log.c: what the four numbers are is said where it is called. */
uint64_t now_ns(void);
void note(Kind kind, const char *name, int64_t a, int64_t b, int64_t c, int64_t d);

/* memory.c */
int is_on_card(const void *address);
int is_pinned(const void *address);

/* capture.c: each gives an error where a capture forbids what is asked. Stream 0 is the legacy stream. */
cudaError_t refuse_in_capture(const char *call);
cudaError_t wait_for(cudaStream_t stream, const char *call);
cudaError_t add_node(cudaStream_t stream, int is_launch);
int is_captured(cudaStream_t stream);

/* kernels.c */
cudaError_t launch(const char *kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);

/* blas.c: a computation that stubs.c lists. */
int count_computation(const char *name);

#pragma GCC visibility pop
