/* Functions of one line, as lists of names. They ignore their arguments, so CUDA's headers are not included. All linear
 * algebra beyond products is among them: it is counted, its results are garbage, and sizes of workspaces stay as the
 * caller had them, so some of torch.linalg (cholesky, qr) runs out of memory. A function that no list has is the real
 * library's, which finds no card and fails or crashes. */

#pragma GCC visibility push(hidden)
int fail(int error);
int count_computation(const char *name);
#pragma GCC visibility pop

// clang-format off

#define NOTHING(name) int name(void) { return 0; }
#define REFUSED(name) int name(void) { return fail(801); } /* not supported */
#define DRIVER_REFUSED(name) int name(void) { return 801; } /* the driver keeps no last error */
#define COMPUTED(name) int name(void) { return count_computation(#name); }
#define HANDLE(name) int name(void **handle) { static int thing; *handle = &thing; return 0; }

/* CUDA's runtime */
NOTHING(__cudaRegisterFatBinaryEnd) NOTHING(__cudaUnregisterFatBinary) NOTHING(__cudaRegisterVar)
NOTHING(__cudaInitModule) NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaMemPrefetchAsync) NOTHING(cudaMemcpyToSymbol)
NOTHING(cudaMemPoolSetAttribute) NOTHING(cudaMemPoolSetAccess) NOTHING(cudaMemPoolTrimTo) NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamAddCallback) NOTHING(cudaStreamUpdateCaptureDependencies) NOTHING(cudaEventDestroy)
NOTHING(cudaGraphDestroy) NOTHING(cudaGraphExecDestroy) NOTHING(cudaGraphDebugDotPrint) NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop) NOTHING(cudaIpcCloseMemHandle) NOTHING(cudaLibraryUnload)

REFUSED(cudaIpcGetMemHandle) REFUSED(cudaIpcOpenMemHandle) REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcOpenEventHandle) REFUSED(cudaGraphAddNode) REFUSED(cudaGraphConditionalHandleCreate)

/* CUDA's driver */
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxSetLimit) NOTHING(cuModuleUnload)
NOTHING(cuFuncSetCacheConfig) NOTHING(cuMemsetD32Async) NOTHING(cuMemMap) NOTHING(cuMemSetAccess)
NOTHING(cuStreamWriteValue32_v2) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col)

DRIVER_REFUSED(cuMemExportToShareableHandle) DRIVER_REFUSED(cuMemImportFromShareableHandle)
DRIVER_REFUSED(cuMemRetainAllocationHandle) DRIVER_REFUSED(cuMemGetAllocationPropertiesFromHandle)
DRIVER_REFUSED(cuMulticastCreate) DRIVER_REFUSED(cuMulticastAddDevice) DRIVER_REFUSED(cuMulticastBindMem)
DRIVER_REFUSED(cuMulticastUnbind) DRIVER_REFUSED(cuLinkCreate_v2) DRIVER_REFUSED(cuLinkAddData_v2)
DRIVER_REFUSED(cuLinkComplete) DRIVER_REFUSED(cuGreenCtxCreate) DRIVER_REFUSED(cuGreenCtxDestroy)
DRIVER_REFUSED(cuGreenCtxStreamCreate) DRIVER_REFUSED(cuCtxFromGreenCtx) DRIVER_REFUSED(cuDevResourceGenerateDesc)
DRIVER_REFUSED(cuDevSmResourceSplitByCount) DRIVER_REFUSED(cuDeviceGetDevResource)

/* NVRTC and NCCL */
NOTHING(nvrtcDestroyProgram) NOTHING(nvrtcAddNameExpression) NOTHING(ncclCommDestroy) NOTHING(ncclCommAbort)
NOTHING(ncclCommFinalize) NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd)

/* cuBLAS. Names have the type of the elements: S and D real, C and Z complex. */
NOTHING(cublasDestroy_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetSmCountTarget)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasGetMatrixAsync) NOTHING(cublasSetMatrixAsync)
NOTHING(cublasGetVectorAsync) NOTHING(cublasSetVectorAsync)

#define BLAS_REAL(name) COMPUTED(cublasS##name) COMPUTED(cublasD##name)
#define BLAS_COMPLEX(name) COMPUTED(cublasC##name) COMPUTED(cublasZ##name)
#define BLAS(name) BLAS_REAL(name) BLAS_COMPLEX(name)

BLAS(axpy_v2) BLAS(copy_v2) BLAS(rot_v2) BLAS(rotg_v2) BLAS(scal_v2) BLAS(swap_v2) BLAS(symm_v2) BLAS(symv_v2)
BLAS(syr_v2) BLAS(syr2_v2) BLAS(syr2k_v2) BLAS(syrk_v2) BLAS(trmm_v2) BLAS(trmv_v2) BLAS(trsm_v2) BLAS(trsv_v2)
BLAS(gelsBatched) BLAS(gemmBatched) BLAS(geqrfBatched) BLAS(getrfBatched) BLAS(getrsBatched) BLAS(trsmBatched)
BLAS_REAL(asum_v2) BLAS_REAL(nrm2_v2) BLAS_REAL(ger_v2) BLAS_REAL(rotm_v2) BLAS_REAL(rotmg_v2) BLAS_COMPLEX(dotc_v2)
BLAS_COMPLEX(dotu_v2) BLAS_COMPLEX(gemm_v2) BLAS_COMPLEX(gemmStridedBatched) BLAS_COMPLEX(gemv_v2) BLAS_COMPLEX(gerc_v2)
BLAS_COMPLEX(geru_v2) BLAS_COMPLEX(hemm_v2) BLAS_COMPLEX(hemv_v2) BLAS_COMPLEX(her_v2) BLAS_COMPLEX(her2_v2)
BLAS_COMPLEX(her2k_v2) BLAS_COMPLEX(herk_v2) COMPUTED(cublasDdot_v2) COMPUTED(cublasDgemv_v2) COMPUTED(cublasCsrot_v2)
COMPUTED(cublasCsscal_v2) COMPUTED(cublasZdrot_v2) COMPUTED(cublasZdscal_v2) COMPUTED(cublasScasum_v2)
COMPUTED(cublasScnrm2_v2) COMPUTED(cublasDzasum_v2) COMPUTED(cublasDznrm2_v2) COMPUTED(cublasIsamax_v2)
COMPUTED(cublasIsamin_v2) COMPUTED(cublasIdamax_v2) COMPUTED(cublasIdamin_v2) COMPUTED(cublasIcamax_v2)
COMPUTED(cublasIcamin_v2) COMPUTED(cublasIzamax_v2) COMPUTED(cublasIzamin_v2)

/* cuSOLVER. Most functions have a second one for the size of their workspace. */
HANDLE(cusolverDnCreate) HANDLE(cusolverDnCreateParams) HANDLE(cusolverDnCreateGesvdjInfo) NOTHING(cusolverDnDestroy)
NOTHING(cusolverDnDestroyParams) NOTHING(cusolverDnDestroyGesvdjInfo) NOTHING(cusolverDnSetStream)
NOTHING(cusolverDnXgesvdjSetMaxSweeps) NOTHING(cusolverDnXgesvdjSetSortEig) NOTHING(cusolverDnXgesvdjSetTolerance)

#define SIZED(name) COMPUTED(name) NOTHING(name##_bufferSize)
#define SOLVER_REAL(name) SIZED(cusolverDnS##name) SIZED(cusolverDnD##name)
#define SOLVER_COMPLEX(name) SIZED(cusolverDnC##name) SIZED(cusolverDnZ##name)
#define SOLVER(name) SOLVER_REAL(name) SOLVER_COMPLEX(name)
#define SOLVER_UNSIZED(name) \
  COMPUTED(cusolverDnS##name) COMPUTED(cusolverDnD##name) COMPUTED(cusolverDnC##name) COMPUTED(cusolverDnZ##name)

SOLVER(geqrf) SOLVER(gesvd) SOLVER(gesvdaStridedBatched) SOLVER(gesvdj) SOLVER(gesvdjBatched) SOLVER(getrf)
SOLVER(potrf) SOLVER(sytrf) SOLVER_REAL(orgqr) SOLVER_REAL(ormqr) SOLVER_REAL(syevd) SOLVER_REAL(syevjBatched)
SOLVER_COMPLEX(ungqr) SOLVER_COMPLEX(unmqr) SOLVER_COMPLEX(heevd) SOLVER_COMPLEX(heevjBatched) SOLVER_UNSIZED(getrs)
SOLVER_UNSIZED(potrfBatched) SOLVER_UNSIZED(potrs) SOLVER_UNSIZED(potrsBatched) SIZED(cusolverDnXgeev)
SIZED(cusolverDnXgeqrf) SIZED(cusolverDnXpotrf) SIZED(cusolverDnXsyevBatched) SIZED(cusolverDnXsyevd)
SIZED(cusolverDnXsytrs) COMPUTED(cusolverDnXpotrs)
