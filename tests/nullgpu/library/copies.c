/* Copies and memsets. They are done at once, and only up to NULLGPU_COPY bytes (1 MiB unless it says otherwise): small
 * tensors hold what was put there, large ones stay untouched. Which waits are needed is as on a card. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>

static size_t copy_limit = 1 << 20;

__attribute__((constructor)) static void read_copy_limit(void) {
  const char *limit = getenv("NULLGPU_COPY");
  if (limit) copy_limit = strtoull(limit, 0, 10);
}

static const char *direction(const void *to, const void *from) {
  int to_card = is_on_card(to), from_card = is_on_card(from);
  if (to_card && from_card) return "d2d";
  if (to_card) return is_pinned(from) ? "h2d pinned" : "h2d pageable";
  if (from_card) return is_pinned(to) ? "d2h pinned" : "d2h pageable";
  return "h2h";
}

/* copy: bytes, whether it is asynchronous, whether it is captured. */
static cudaError_t copy(void *to, const void *from, size_t size, cudaStream_t stream, int is_async) {
  cudaError_t error = add_node(stream, 0);
  if (error) return error;
  if (size <= copy_limit) memcpy(to, from, size);
  note(COPY, direction(to, from), size, is_async, is_captured(stream), 0);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  cudaError_t error = wait_for(0, "cudaMemcpy");
  return error ? error : copy(to, from, size, 0, 0);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size, stream, 1);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
  return copy(to, from, size, stream, 1);
}

/* set: bytes. */
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  cudaError_t error = add_node(stream, 0);
  if (error) return error;
  if (size <= copy_limit) memset(start, value, size);
  note(SET, "memset", size, 0, 0, 0);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, 0); }
