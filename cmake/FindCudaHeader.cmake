# Finds cuda.h, the one file of CUDA that the build needs: libcuda itself is loaded at run time.
# Looked for in this order: -DVTENSOR_CUDA_INCLUDE=<folder>, the site-packages of the Python that builds
# (wheel nvidia-cuda-runtime: nvidia/cu13/include), /usr/local/cuda/include.
# Defines the target CudaHeader::CudaHeader and CudaHeader_INCLUDE_DIR.
set(VTENSOR_CUDA_INCLUDE "" CACHE PATH "Folder that holds cuda.h (default: found)")

set(cuda_header_hints "${VTENSOR_CUDA_INCLUDE}")
if(NOT VTENSOR_CUDA_INCLUDE)
  set(cuda_header_hints "")
  if(Python_EXECUTABLE)
    # The newest release first; older wheels keep the header in nvidia/cuda_runtime.
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import glob, sys
print(';'.join(path for entry in sys.path for pattern in ('cu[0-9]*', 'cuda_runtime')
               for path in sorted(glob.glob(f'{entry}/nvidia/{pattern}/include'), reverse=True)))"
      OUTPUT_VARIABLE cuda_header_hints OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  list(APPEND cuda_header_hints /usr/local/cuda/include)
endif()

# Not cached by find_path: a build in an isolated environment leaves a folder behind that is gone next time.
unset(CudaHeader_INCLUDE_DIR CACHE)
find_path(CudaHeader_INCLUDE_DIR cuda.h HINTS ${cuda_header_hints} NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudaHeader
  REQUIRED_VARS CudaHeader_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "cuda.h is missing: pip install 'nvidia-cuda-runtime==13.*', or set VTENSOR_CUDA_INCLUDE")

if(CudaHeader_FOUND AND NOT TARGET CudaHeader::CudaHeader)
  add_library(CudaHeader::CudaHeader INTERFACE IMPORTED)
  target_include_directories(CudaHeader::CudaHeader SYSTEM INTERFACE "${CudaHeader_INCLUDE_DIR}")
endif()
