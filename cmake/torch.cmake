# LibTorch for the tests that take it as a second opinion: the folder `torch` of a PyPI wheel. Its own CMake package
# asks for a CUDA toolkit, which the CPU library does not need, so the targets are made here.

if("${CMAKE_CXX_FLAGS} ${CMAKE_SHARED_LINKER_FLAGS} ${CMAKE_EXE_LINKER_FLAGS}" MATCHES "-static-libstdc")
  message(FATAL_ERROR "PyTorch and its operators share one libstdc++: build without -static-libstdc++")
endif()
set(LOCKSTEP_TORCH_DIR ${PROJECT_SOURCE_DIR}/.lockstep/wheels/torch CACHE PATH
    "The folder of PyTorch's Python package, with include/ and lib/")
if(EXISTS ${LOCKSTEP_TORCH_DIR}/include/ATen/ATen.h)
  add_library(lockstep_torch INTERFACE)
  target_include_directories(lockstep_torch SYSTEM INTERFACE
    ${LOCKSTEP_TORCH_DIR}/include ${LOCKSTEP_TORCH_DIR}/include/torch/csrc/api/include)
  target_link_directories(lockstep_torch INTERFACE ${LOCKSTEP_TORCH_DIR}/lib)
  target_link_options(lockstep_torch INTERFACE
    -Wl,--as-needed -Wl,--unresolved-symbols=ignore-in-shared-libs -Wl,-rpath,${LOCKSTEP_TORCH_DIR}/lib)
  # libstdc++ is the process's own, and named ahead of libc10, which exports some of its functions from another version:
  # with two of them in one process, a message that prints numbers ends it. It is named by its file, since -lstdc++ takes
  # libstdc++.a where a folder has that alone.
  target_link_libraries(lockstep_torch INTERFACE -l:libstdc++.so.6 torch_cpu c10)
else()
  message(STATUS "The tests against LibTorch are left out: there is none in ${LOCKSTEP_TORCH_DIR} "
                 "(./lockstep test brings it in; -D LOCKSTEP_TORCH_DIR=… names the torch folder of an installed wheel)")
endif()
