# The files *_test.cpp below properties/ become one program per tier: _full_test.cpp and _gpu_test.cpp name their tier,
# every other test is quick. A tier is a label of ctest. _torch_test.cpp are quick too, in a program of their own: the
# only files that wait for LibTorch's headers, which they share precompiled. Every other .cpp helps the tests.

find_package(GTest REQUIRED)
find_package(rapidcheck REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
include(GoogleTest)

file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS properties/*_test.cpp)
file(GLOB_RECURSE support_sources CONFIGURE_DEPENDS properties/*.cpp)
list(FILTER support_sources EXCLUDE REGEX "_(test|fuzz)\\.cpp$|/consumer/")

# Some tests exist once per trace or rule, and the names of tests are asked for after linking: a new one links again.
file(GLOB_RECURSE traces CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} fixtures/*.trace)
list(JOIN traces "\n" trace_names)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/traces.txt CONTENT "${trace_names}\n" @ONLY)

add_library(lockstep_test_requirements INTERFACE)
target_link_libraries(lockstep_test_requirements INTERFACE
  lockstep_requirements GTest::gtest_main rapidcheck_gtest)
target_compile_definitions(lockstep_test_requirements INTERFACE
  LOCKSTEP_PROGRAM="$<TARGET_FILE:lockstep>" LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
  LOCKSTEP_CANDIDATES="${PROJECT_BINARY_DIR}/lockstep_candidates.so")

# Kernels for `lockstep judge` to judge, right ones and broken ones: a library like somebody else's.
if(TARGET lockstep_views)
  file(GLOB candidate_sources CONFIGURE_DEPENDS fixtures/candidates/*.cpp)
  add_library(lockstep_candidates MODULE ${candidate_sources})
  set_target_properties(lockstep_candidates PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_link_libraries(lockstep_candidates PRIVATE lockstep_requirements lockstep_views lockstep_compiled)
  target_precompile_headers(lockstep_candidates REUSE_FROM lockstep_judge)
endif()

# --- Programs of tests ----------------------------------------------------------------------------

function(lockstep_compile_tests target)  # lockstep_compile_tests(TARGET [HEADERS…]): with HEADERS precompiled too
  # A quarter less to compile than at -O1, about half of -O3: what takes long when tests run lies in the parts, which are
  # optimized. Only where all shapes are tested, on a machine with a GPU, references in the tests take most of the time.
  if(NOT LOCKSTEP_ALL_SHAPES)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Og>)
  endif()
  target_precompile_headers(${target} PRIVATE
    <algorithm> <array> <charconv> <cmath> <filesystem> <fstream> <functional> <map> <memory> <optional> <set> <span>
    <sstream> <string> <vector> <fmt/format.h> <gmock/gmock.h> <gtest/gtest.h> <tl/expected.hpp> ${ARGN})
endfunction()

function(lockstep_tier label)  # lockstep_tier(LABEL SOURCES…): nothing where there is no source
  if(NOT ARGN)
    return()
  elseif(NOT TARGET lockstep_views)
    message(STATUS "The ${label} tests are left out: there are no CCCL headers (./lockstep test brings them in)")
    return()
  endif()
  set(program lockstep_tests_${label})
  if(label STREQUAL quick)
    set(program lockstep_tests)
  endif()
  if(label STREQUAL gpu)  # kernels and references meet here, and nothing of cache_sim/ has to be built
    add_executable(${program} ${ARGN} $<TARGET_OBJECTS:lockstep_kernels>)
    target_link_libraries(${program} PRIVATE
      lockstep_kernels lockstep_compiled lockstep_views GTest::gtest_main GTest::gmock rapidcheck_gtest)
    lockstep_compile_tests(${program} ${compiled_functions})
  else()  # the tests of numbers apart, so that a change of a reference compiles no test of caches
    set(number_tests ${ARGN})
    list(FILTER number_tests INCLUDE REGEX "/properties/(kernels|reference/[^c])")
    list(REMOVE_ITEM ARGN ${number_tests})
    add_library(${program}_of_numbers OBJECT ${number_tests})
    add_executable(${program} ${ARGN} $<TARGET_OBJECTS:${program}_of_numbers> ${support_sources})
    target_link_libraries(${program} PRIVATE lockstep::lockstep lockstep_test_requirements lockstep_views)
    target_link_libraries(${program}_of_numbers PRIVATE lockstep_test_requirements lockstep_views)
    lockstep_compile_tests(${program})
    lockstep_unite(${program})
    lockstep_unite(${program}_of_numbers)
    lockstep_compile_tests(${program}_of_numbers ${compiled_functions})
    add_dependencies(${program} lockstep lockstep-judge lockstep_candidates)
  endif()
  set_target_properties(${program} PROPERTIES LINK_DEPENDS
    "${PROJECT_BINARY_DIR}/traces.txt;${PROJECT_SOURCE_DIR}/properties/reference/caches/sglang_rules.txt")
  set(properties LABELS ${label} TIMEOUT 600)
  if(label STREQUAL full)  # 100,000 traces of a policy take up to four minutes alone
    set(properties LABELS ${label} TIMEOUT 5400)
    lockstep_built_when_asked(${program} ${program}_of_numbers)
  endif()
  if(label STREQUAL gpu)
    list(APPEND properties RESOURCE_LOCK gpu)
    lockstep_built_when_asked(${program})
  endif()
  gtest_discover_tests(${program} DISCOVERY_MODE POST_BUILD DISCOVERY_TIMEOUT 120 PROPERTIES ${properties})
endfunction()

set(torch_sources ${test_sources})
list(FILTER test_sources EXCLUDE REGEX "_torch_test\\.cpp$")
list(FILTER torch_sources INCLUDE REGEX "_torch_test\\.cpp$")
set(static_kv_sources ${torch_sources})  # a program of their own: their time is spent in LibTorch
list(FILTER torch_sources EXCLUDE REGEX "/static_kv/")
list(FILTER static_kv_sources INCLUDE REGEX "/static_kv/")
set(number_sources ${torch_sources})  # the same: they need the caches, too
list(FILTER torch_sources EXCLUDE REGEX "/numbers/torch/")
list(FILTER number_sources INCLUDE REGEX "/numbers/torch/")
if(TARGET lockstep_torch AND TARGET lockstep_views)
  add_executable(lockstep_torch_tests ${torch_sources})
  target_link_libraries(lockstep_torch_tests PRIVATE
    lockstep_requirements lockstep_views lockstep_compiled lockstep_torch GTest::gtest_main rapidcheck_gtest ${CMAKE_DL_LIBS})
  lockstep_precompile_torch(lockstep_torch_tests)
  target_compile_definitions(lockstep_torch_tests PRIVATE
    LOCKSTEP_TORCH_OPS="$<TARGET_FILE:lockstep_torch_ops>" LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_dependencies(lockstep_torch_tests lockstep_torch_ops)
endif()
if(TARGET lockstep_numbers_torch)
  # Apart: LibTorch's headers bring another version of fmt.
  add_library(lockstep_number_support OBJECT
    properties/support/fidelity.cpp properties/support/program.cpp properties/support/search.cpp)
  target_link_libraries(lockstep_number_support PRIVATE lockstep_requirements lockstep_views GTest::gtest GTest::gmock
    rapidcheck_gtest)
  target_compile_definitions(lockstep_number_support PRIVATE
    LOCKSTEP_PROGRAM="$<TARGET_FILE:lockstep>" LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}" LOCKSTEP_CANDIDATES="")
  add_executable(lockstep_numbers_torch_tests ${number_sources} $<TARGET_OBJECTS:lockstep_number_support>)
  target_link_libraries(lockstep_numbers_torch_tests PRIVATE lockstep_once lockstep_sim lockstep_reference lockstep_numbers
    lockstep_models lockstep_numbers_torch lockstep_judge lockstep_compiled $<TARGET_NAME_IF_EXISTS:lockstep_device>
    GTest::gtest_main GTest::gmock ${CMAKE_DL_LIBS})
  target_compile_definitions(lockstep_numbers_torch_tests PRIVATE
    LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  lockstep_precompile_torch(lockstep_numbers_torch_tests)
  add_dependencies(lockstep_numbers_torch_tests lockstep lockstep-torch)
endif()
if(TARGET lockstep_static_kv)
  add_executable(lockstep_static_kv_tests ${static_kv_sources})
  target_link_libraries(lockstep_static_kv_tests PRIVATE
    lockstep_static_kv lockstep_reference lockstep_models lockstep_compiled GTest::gtest_main ${CMAKE_DL_LIBS})
  lockstep_precompile_torch(lockstep_static_kv_tests)
  add_dependencies(lockstep_static_kv_tests lockstep_static_kv_generate)
endif()
if(TARGET lockstep_cuda_graph)  # the same tests over CUDA graphs, and their times (bench/static_kv_on_gpu.sh)
  list(FILTER static_kv_sources INCLUDE REGEX "_graphs_torch_test\\.cpp$")
  add_executable(lockstep_static_kv_gpu_tests ${static_kv_sources})
  add_executable(lockstep_static_kv_times bench/static_kv_times.cpp)
  add_executable(lockstep_graph_copy bench/initcheck_graph_copy.cu)  # what compute-sanitizer says of a copy in a graph
  foreach(target lockstep_static_kv_gpu_tests lockstep_static_kv_times)
    target_compile_definitions(${target} PRIVATE LOCKSTEP_STATIC_KV_GPU)
    target_compile_options(${target} PRIVATE -O1)
    target_link_libraries(${target} PRIVATE lockstep_cuda_graph
      $<FILTER:$<TARGET_OBJECTS:lockstep_static_kv>,EXCLUDE,\\.gch$> lockstep_reference lockstep_models lockstep_compiled)
  endforeach()
  target_link_libraries(lockstep_static_kv_gpu_tests PRIVATE GTest::gtest_main)
  lockstep_built_when_asked(lockstep_static_kv_gpu_tests lockstep_static_kv_times lockstep_graph_copy)
endif()

foreach(tier full gpu)
  set(tier_sources ${test_sources})
  list(FILTER tier_sources INCLUDE REGEX "_${tier}_test\\.cpp$")
  list(FILTER test_sources EXCLUDE REGEX "_${tier}_test\\.cpp$")
  if(tier STREQUAL gpu AND NOT TARGET lockstep_kernels)
    continue()
  endif()
  lockstep_tier(${tier} ${tier_sources})
endforeach()
if(TARGET lockstep_kernels)
  add_executable(lockstep_cluster bench/synccheck_cluster.cu)  # what compute-sanitizer says of a large cluster
  lockstep_built_when_asked(lockstep_cluster)
endif()
lockstep_tier(quick ${test_sources})
# It fills caches of every type with bytes that are NaN, __nv_bfloat16 among them.
set_source_files_properties(properties/kernels/attention/mla_decode_gpu_test.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:-Wno-class-memaccess>")

# The files *_fuzz.cpp below properties/ become libFuzzer programs, where the compiler has it. Coverage guides them only
# if the library was compiled with it too: the preset `fuzz`. The tier runs each for a minute; properties/fuzz.py runs
# them for ten million executions.
if(CMAKE_CXX_COMPILER_ID STREQUAL Clang AND CMAKE_CXX_FLAGS MATCHES "fuzzer-no-link")
  file(GLOB_RECURSE fuzz_sources CONFIGURE_DEPENDS properties/*_fuzz.cpp)
  add_custom_target(lockstep_fuzz)  # all of them, and nothing else
  foreach(source IN LISTS fuzz_sources)
    string(REGEX REPLACE ".*/(.*)_fuzz\\.cpp" "\\1" name ${source})
    add_executable(lockstep_fuzz_${name} ${source})
    target_link_libraries(lockstep_fuzz_${name} PRIVATE lockstep::lockstep -fsanitize=fuzzer)
    add_dependencies(lockstep_fuzz lockstep_fuzz_${name})
    add_test(NAME fuzz.${name} COMMAND ${PROJECT_SOURCE_DIR}/properties/fuzz.py ${name} --time 60
                                       --build ${PROJECT_BINARY_DIR})
    set_tests_properties(fuzz.${name} PROPERTIES LABELS fuzz TIMEOUT 600)
  endforeach()
endif()

include(cmake/checks.cmake)
