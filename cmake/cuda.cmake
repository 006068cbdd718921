# nvcc and the headers of CCCL. Sets LOCKSTEP_CUDA_FOUND, LOCKSTEP_NVCC_FLAGS and, where CCCL is, lockstep_views.

# Inside somebody else's project nvcc is not started without being asked for.
set(cuda_default off)
if(PROJECT_IS_TOP_LEVEL)
  set(cuda_default auto)
endif()
set(LOCKSTEP_CUDA ${cuda_default} CACHE STRING "Compile the kernels: auto (where nvcc is), on or off")
set_property(CACHE LOCKSTEP_CUDA PROPERTY STRINGS auto on off)
if(NOT LOCKSTEP_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "LOCKSTEP_CUDA is '${LOCKSTEP_CUDA}'; it is auto, on or off")
endif()

find_program(LOCKSTEP_NVCC nvcc PATHS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
mark_as_advanced(LOCKSTEP_NVCC)

# Whether nvcc is new enough and gets along with the host compiler; the answer is a sentence when it does not.
function(lockstep_check_nvcc complaint)
  set(${complaint} "" PARENT_SCOPE)
  if(NOT LOCKSTEP_NVCC)
    set(${complaint} "there is no nvcc" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${LOCKSTEP_NVCC} --version OUTPUT_VARIABLE text ERROR_QUIET)
  if(NOT text MATCHES "release ([0-9.]+)" OR CMAKE_MATCH_1 VERSION_LESS 13.0)
    set(${complaint} "${LOCKSTEP_NVCC} is not nvcc 13.0 or newer" PARENT_SCOPE)
    return()
  endif()
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(ENV{CUDACXX} ${LOCKSTEP_NVCC})  # the folder need not be on the PATH
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(${complaint} "${LOCKSTEP_NVCC} does not work with ${CMAKE_CXX_COMPILER}" PARENT_SCOPE)
  endif()
endfunction()

set(LOCKSTEP_CUDA_FOUND OFF)
if(NOT LOCKSTEP_CUDA STREQUAL off)
  lockstep_check_nvcc(complaint)
  if(NOT complaint)
    set(LOCKSTEP_CUDA_FOUND ON)
  elseif(LOCKSTEP_CUDA STREQUAL on)
    message(FATAL_ERROR "LOCKSTEP_CUDA=on, but ${complaint}")
  else()
    message(STATUS "No CUDA: ${complaint}")
  endif()
endif()

if(LOCKSTEP_CUDA_FOUND)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # CMake 3.25 does not know the C++20 flag of nvcc 13, so it is spelled out.
  # Warning 20012 is about the annotations inside Eigen 3.4.
  set(LOCKSTEP_NVCC_FLAGS -std=c++20 --expt-relaxed-constexpr -diag-suppress=20012 -Xcompiler=-Wall,-Wextra)
  if(LOCKSTEP_WERROR)
    list(APPEND LOCKSTEP_NVCC_FLAGS --Werror=all-warnings)
  endif()
endif()

option(LOCKSTEP_NUMBERS "Build what computes numbers, where CCCL's headers are: the judge, fidelities beyond labels" ON)
# Views are cuda::std::mdspan. The headers are those of the toolkit, or those that ./lockstep brings in for judge and tests.
# CMake 3.25 does not add the toolkit's include/cccl.
file(REAL_PATH "${LOCKSTEP_NVCC}" nvcc)
find_path(LOCKSTEP_CCCL_INCLUDE_DIR cuda/std/mdspan NO_DEFAULT_PATH PATHS
  ${nvcc}/../../include/cccl ${PROJECT_SOURCE_DIR}/.lockstep/wheels/nvidia/cu13/include/cccl)
if(LOCKSTEP_NUMBERS AND LOCKSTEP_CCCL_INCLUDE_DIR)
  add_library(lockstep_views INTERFACE)
  target_include_directories(lockstep_views SYSTEM INTERFACE ${LOCKSTEP_CCCL_INCLUDE_DIR})
endif()
