/* Streams, events and captures. Nothing runs, so a stream is always done; what is kept is which streams capture, and
 * the rules: what a capture forbids, which streams join it, what breaks it. Two things are milder than on a card: a
 * call that the capture's mode forbids fails but does not break the capture, and of several captures at once the last
 * one's mode counts. A graph is counts of what was captured, so a replay is one line of the log. */
#include "nullgpu.h"
#include <stdlib.h>

typedef struct {
  int id, nodes, launches, is_open, is_broken;
} Graph;

typedef struct {
  int priority;
  unsigned flags;
  Graph *graph; /* the capture that it is part of, or was */
  int is_origin;
} Stream;

typedef struct {
  Stream *stream;
  Graph *graph;
  uint64_t ns;
} Event;

static Stream legacy_stream;
static int graph_count, open_captures;
static int blocking_captures; /* those of streams for which the legacy stream waits */
static enum cudaStreamCaptureMode capture_mode;
static __thread int own_captures;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static Stream *stream_of(cudaStream_t stream) {
  int is_legacy = stream == 0 || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_legacy ? &legacy_stream : (Stream *)stream;
}

static Graph *capture_of(const Stream *stream) { return stream->graph && stream->graph->is_open ? stream->graph : 0; }

int is_captured(cudaStream_t stream) { return capture_of(stream_of(stream)) != 0; }

/* ---- what a capture forbids ---- */

/* Mode global forbids unsafe calls to all threads, thread_local to the one that captures; a relaxed thread may make
 * any. */
static int forbids_unsafe_calls(void) {
  if (!open_captures || thread_mode == cudaStreamCaptureModeRelaxed) return 0;
  if (capture_mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal) return 1;
  return capture_mode != cudaStreamCaptureModeRelaxed && own_captures;
}

/* sync: -1 where a capture forbade it. */
cudaError_t refuse_in_capture(const char *call) {
  if (!forbids_unsafe_calls()) return cudaSuccess;
  note(SYNC, "CAPTURE BROKEN", 0, 0, 0, 0);
  note(SYNC, call, -1, 0, 0, 0);
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t wait_for(cudaStream_t stream, const char *call) {
  Graph *graph = capture_of(stream_of(stream));
  if (graph) {
    graph->is_broken = 1;
    note(SYNC, call, -1, 0, 0, 0);
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  cudaError_t error = refuse_in_capture(call);
  if (!error) note(SYNC, call, 0, 0, 0, 0);
  return error;
}

cudaError_t add_node(cudaStream_t stream, int is_launch) {
  const Stream *at = stream_of(stream);
  if (at == &legacy_stream && blocking_captures) return fail(cudaErrorStreamCaptureImplicit);
  Graph *graph = capture_of(at);
  if (graph) {
    graph->nodes++;
    graph->launches += is_launch;
  }
  return cudaSuccess;
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  Stream *made = calloc(1, sizeof *made);
  made->priority = priority;
  made->flags = flags;
  *stream = (cudaStream_t)made;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (is_captured(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  return refuse_in_capture("cudaStreamQuery");
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for(stream, "cudaStreamSynchronize"); }
cudaError_t cudaDeviceSynchronize(void) { return wait_for(0, "cudaDeviceSynchronize"); }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  if (!is_captured(stream)) function(data);
  return add_node(stream, 0);
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  Stream *at = stream_of(stream);
  *(Event *)event = (Event){at, capture_of(at), now_ns()};
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (((Event *)event)->graph) return fail(cudaErrorCapturedEvent);
  return refuse_in_capture("cudaEventQuery");
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (((Event *)event)->graph) return fail(cudaErrorCapturedEvent);
  return wait_for(0, "cudaEventSynchronize");
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = (((Event *)end)->ns - ((Event *)start)->ns) / 1e6f;
  return cudaSuccess;
}

/* A stream that waits for an event of a capture joins the capture. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Stream *at = stream_of(stream);
  const Event *awaited = (Event *)event;
  if (capture_of(at)) {
    int is_outside = awaited->stream && !awaited->graph;
    return is_outside ? fail(cudaErrorStreamCaptureIsolation) : cudaSuccess;
  }
  if (!awaited->graph || !awaited->graph->is_open) return cudaSuccess;
  if (at == &legacy_stream) return fail(cudaErrorStreamCaptureImplicit);
  at->graph = awaited->graph;
  at->is_origin = 0;
  return cudaSuccess;
}

/* ---- captures and graphs ---- */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

static void count_capture(const Stream *stream, int change) {
  open_captures += change;
  own_captures += change;
  if (!(stream->flags & cudaStreamNonBlocking)) blocking_captures += change;
}

/* graph, begin: the graph, the mode. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  Stream *at = stream_of(stream);
  if (at == &legacy_stream) return fail(cudaErrorStreamCaptureUnsupported);
  if (capture_of(at)) return fail(cudaErrorIllegalState);
  at->graph = calloc(1, sizeof *at->graph);
  at->graph->id = ++graph_count;
  at->graph->is_open = 1;
  at->is_origin = 1;
  capture_mode = mode;
  count_capture(at, 1);
  note(GRAPH, "begin", at->graph->id, mode, 0, 0);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *nodes,
                                          const cudaGraphEdgeData *edges, size_t count,
                                          enum cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}

/* graph, end: the graph, its nodes, launches among them, whether it is broken. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  Stream *at = stream_of(stream);
  Graph *made = capture_of(at);
  if (!made || !at->is_origin) return fail(cudaErrorStreamCaptureUnmatched);
  made->is_open = 0;
  count_capture(at, -1);
  note(GRAPH, "end", made->id, made->nodes, made->launches, made->is_broken);
  *graph = made->is_broken ? 0 : (cudaGraph_t)made;
  return made->is_broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  const Stream *at = stream_of(stream);
  if (at == &legacy_stream && blocking_captures) return fail(cudaErrorStreamCaptureImplicit);
  const Graph *graph = capture_of(at);
  *status = cudaStreamCaptureStatusNone;
  if (graph) *status = graph->is_broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  static cudaGraphNode_t none[1];
  cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (error) return error;
  Graph *at = capture_of(stream_of(stream));
  if (id) *id = at ? at->id : 0;
  if (graph) *graph = (cudaGraph_t)at;
  if (nodes) *nodes = none;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *instance, cudaGraph_t graph, unsigned long long flags) {
  cudaError_t error = refuse_in_capture("instantiate");
  if (error) return error;
  *instance = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

/* graph, launch: the graph, its nodes, launches among them. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  const Graph *graph = (Graph *)instance;
  note(GRAPH, "launch", graph->id, graph->nodes, graph->launches, 0);
  return add_node(stream, 1);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = ((Graph *)graph)->nodes;
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes, cudaGraphEdgeData *edges,
                                         size_t *count) {
  *count = 0;
  return cudaSuccess;
}
