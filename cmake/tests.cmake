# properties/*_test.cpp become one program per tier: _full_test.cpp and _gpu_test.cpp name their tier, every other test
# is quick. A tier is a label of ctest. _torch_test.cpp are quick too, in a program of their own: the only files that
# wait for LibTorch's headers, which they share precompiled.

find_package(GTest REQUIRED)
find_package(rapidcheck REQUIRED)

file(GLOB support_sources CONFIGURE_DEPENDS properties/support/*.cpp)
file(GLOB test_sources CONFIGURE_DEPENDS properties/*_test.cpp)

# Some tests exist once per trace, and the names of tests are asked for after linking: a new trace links again.
file(GLOB_RECURSE traces CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} fixtures/*.trace)
list(JOIN traces "\n" trace_names)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/traces.txt CONTENT "${trace_names}\n" @ONLY)

add_library(lockstep_test_requirements INTERFACE)
target_link_libraries(lockstep_test_requirements INTERFACE
  lockstep::lockstep GTest::gtest_main rapidcheck_gtest)
target_compile_definitions(lockstep_test_requirements INTERFACE
  LOCKSTEP_PROGRAM="$<TARGET_FILE:lockstep>" LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}")

# Kernels for `lockstep judge` to judge, right ones and broken ones: a library like somebody else's.
if(TARGET lockstep_views)
  file(GLOB candidate_sources CONFIGURE_DEPENDS fixtures/candidates/*.cpp)
  add_library(lockstep_candidates MODULE ${candidate_sources})
  set_target_properties(lockstep_candidates PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_link_libraries(lockstep_candidates PRIVATE lockstep_requirements lockstep_views)
  set_source_files_properties(properties/judge_test.cpp PROPERTIES
    COMPILE_DEFINITIONS LOCKSTEP_CANDIDATES="${PROJECT_BINARY_DIR}/lockstep_candidates.so")
endif()

include(GoogleTest)
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
      lockstep_kernels lockstep_views GTest::gtest_main GTest::gmock rapidcheck_gtest)
  else()
    add_executable(${program} ${ARGN} ${support_sources})
    target_link_libraries(${program} PRIVATE lockstep_test_requirements lockstep_views)
    add_dependencies(${program} lockstep lockstep-judge lockstep_candidates)
  endif()
  set_target_properties(${program} PROPERTIES LINK_DEPENDS ${PROJECT_BINARY_DIR}/traces.txt)
  set(properties LABELS ${label} TIMEOUT 600)
  if(label STREQUAL full)  # 100,000 traces of a policy take up to four minutes alone
    set(properties LABELS ${label} TIMEOUT 1800)
  endif()
  if(label STREQUAL gpu)
    list(APPEND properties RESOURCE_LOCK gpu)
  endif()
  gtest_discover_tests(${program} DISCOVERY_MODE POST_BUILD DISCOVERY_TIMEOUT 120 PROPERTIES ${properties})
endfunction()

set(torch_sources ${test_sources})
list(FILTER torch_sources INCLUDE REGEX "_torch_test\\.cpp$")
list(FILTER torch_sources EXCLUDE REGEX "/(static_kv_runtime|static_kv_graphs|exported_operators)_torch_test\\.cpp$")  # a program of their own, below
list(FILTER test_sources EXCLUDE REGEX "_torch_test\\.cpp$")
if(torch_sources AND TARGET lockstep_torch AND TARGET lockstep_views)
  add_executable(lockstep_torch_tests ${torch_sources})
  target_link_libraries(lockstep_torch_tests PRIVATE
    lockstep_requirements lockstep_views lockstep_torch GTest::gtest_main rapidcheck_gtest)
  target_precompile_headers(lockstep_torch_tests PRIVATE <ATen/ATen.h> <gtest/gtest.h>)
  set_source_files_properties(
    properties/torch_ops_torch_test.cpp properties/mla_torch_test.cpp properties/latents_torch_test.cpp
    properties/replay_rings_torch_test.cpp PROPERTIES
    COMPILE_DEFINITIONS
    "LOCKSTEP_TORCH_OPS=\"$<TARGET_FILE:lockstep_torch_ops>\";LOCKSTEP_SOURCE_DIR=\"${PROJECT_SOURCE_DIR}\"")
  target_link_libraries(lockstep_torch_tests PRIVATE ${CMAKE_DL_LIBS})
  add_dependencies(lockstep_torch_tests lockstep_torch_ops)
  # One test of ctest per tier: each start of the program loads LibTorch anew.
  set(table RecurrenceAccuracy.*)
  set(operators TorchOps*)
  add_test(NAME reference.agrees_with_libtorch
           COMMAND lockstep_torch_tests --gtest_filter=-${table}:${operators})
  add_test(NAME operators.keep_their_contract COMMAND lockstep_torch_tests --gtest_filter=${operators})
  add_test(NAME reference.accuracy_by_length COMMAND lockstep_torch_tests --gtest_filter=${table})
  set_tests_properties(reference.agrees_with_libtorch operators.keep_their_contract
    PROPERTIES LABELS quick TIMEOUT 600)
  set_tests_properties(reference.accuracy_by_length PROPERTIES LABELS full TIMEOUT 600)
endif()

# It fills caches of every type with bytes that are NaN, __nv_bfloat16 among them.
set_source_files_properties(properties/mla_decode_gpu_test.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:-Wno-class-memaccess>")
foreach(tier full gpu)
  set(tier_sources ${test_sources})
  list(FILTER tier_sources INCLUDE REGEX "_${tier}_test\\.cpp$")
  list(FILTER test_sources EXCLUDE REGEX "_${tier}_test\\.cpp$")
  if(tier STREQUAL gpu AND NOT TARGET lockstep_kernels)
    continue()
  endif()
  lockstep_tier(${tier} ${tier_sources})
endforeach()
lockstep_tier(quick ${test_sources})

# What kernels say of arguments that they refuse needs no GPU: nothing is launched.
if(TARGET lockstep_tests_gpu)
  add_test(NAME kernels.refuse_arguments_by_name COMMAND lockstep_tests_gpu --gtest_filter=*Arguments.*)
  set_tests_properties(kernels.refuse_arguments_by_name PROPERTIES LABELS quick TIMEOUT 60)
endif()

# properties/*_fuzz.cpp become libFuzzer programs, where the compiler has it. Coverage guides them only if the
# library was compiled with it too: the preset `fuzz`. The tier runs each for a minute; properties/fuzz.py runs them
# for ten million executions.
if(CMAKE_CXX_COMPILER_ID STREQUAL Clang AND CMAKE_CXX_FLAGS MATCHES "fuzzer-no-link")
  file(GLOB fuzz_sources CONFIGURE_DEPENDS properties/*_fuzz.cpp)
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

# SGLang's own classes, where `python3 fixtures/subjects/sglang setup` has made their environment.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME subjects.sglang_agrees_on_kept_traces
         COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/fixtures/subjects/sglang check $<TARGET_FILE:lockstep>)
set_tests_properties(subjects.sglang_agrees_on_kept_traces
  PROPERTIES LABELS quick TIMEOUT 600 SKIP_RETURN_CODE 77)
foreach(word searches schedules)
  add_test(NAME subjects.sglang_${word}
           COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/fixtures/subjects/sglang ${word} $<TARGET_FILE:lockstep>)
  set_tests_properties(subjects.sglang_${word} PROPERTIES LABELS full TIMEOUT 1200 SKIP_RETURN_CODE 77)
endforeach()

# llama.cpp's own library, where `python3 fixtures/subjects/llama_cpp setup` has built it.
add_test(NAME subjects.llama_cpp_shows_what_its_traces_say
         COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/fixtures/subjects/llama_cpp check $<TARGET_FILE:lockstep>)
set_tests_properties(subjects.llama_cpp_shows_what_its_traces_say
  PROPERTIES LABELS quick TIMEOUT 600 SKIP_RETURN_CODE 77)

# vLLM's own block manager, where `python3 fixtures/subjects/vllm setup` has made its environment.
add_test(NAME subjects.vllm_agrees_on_kept_traces
         COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/fixtures/subjects/vllm check $<TARGET_FILE:lockstep>)
set_tests_properties(subjects.vllm_agrees_on_kept_traces
  PROPERTIES LABELS quick TIMEOUT 600 SKIP_RETURN_CODE 77)
foreach(word schedules searches reports)
  add_test(NAME subjects.vllm_${word}
           COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/fixtures/subjects/vllm ${word} $<TARGET_FILE:lockstep>)
  set_tests_properties(subjects.vllm_${word} PROPERTIES LABELS full TIMEOUT 3600 SKIP_RETURN_CODE 77)
endforeach()

# The laws of the references again, with ten times the cases of the quick tier, as a list with cases and discards.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(TARGET lockstep_tests)
  add_test(NAME reference.laws_with_1000_cases
    COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/list_laws.py $<TARGET_FILE:lockstep_tests>)
  set_tests_properties(reference.laws_with_1000_cases PROPERTIES LABELS full TIMEOUT 1200 PROCESSORS 2)
endif()

# The operators under Python, their CPU half, where PyTorch can be imported (status 77: it cannot): opcheck and
# torch.compile, and lockstep.ops with the signatures of other projects.
if(TARGET lockstep_torch_ops)
  set(check ${PROJECT_SOURCE_DIR}/properties/torch_ops_check.sh)
  add_test(NAME operators.check_under_python
    COMMAND ${check} torch_ops_check.py $<TARGET_FILE:lockstep_torch_ops> --device cpu --backend aot_eager)
  add_test(NAME operators.have_the_peers_signatures
    COMMAND ${check} ops_check.py $<TARGET_FILE:lockstep_torch_ops>)
  add_test(NAME operators.are_within_flashmlas_tolerances
    COMMAND ${check} flashmla_grid_check.py $<TARGET_FILE:lockstep_torch_ops>)
  set_tests_properties(operators.check_under_python operators.have_the_peers_signatures
    operators.are_within_flashmlas_tolerances
    PROPERTIES LABELS quick TIMEOUT 600 SKIP_RETURN_CODE 77 ENVIRONMENT "LOCKSTEP_TORCH_DIR=${LOCKSTEP_TORCH_DIR}")
endif()

# The operators through torch.export, and a package that calls them, which needs no transformers.
if(TARGET lockstep_torch_ops)
  set(package ${PROJECT_BINARY_DIR}/exported_operators)
  add_test(NAME operators.survive_export
    COMMAND ${check} torch_export_check.py $<TARGET_FILE:lockstep_torch_ops>)
  add_test(NAME operators.export_a_package
    COMMAND ${check} torch_export_check.py $<TARGET_FILE:lockstep_torch_ops> --package ${package})
  set_tests_properties(operators.survive_export operators.export_a_package
    PROPERTIES LABELS quick TIMEOUT 1800 SKIP_RETURN_CODE 77 ENVIRONMENT "LOCKSTEP_TORCH_DIR=${LOCKSTEP_TORCH_DIR}")
  set_tests_properties(operators.export_a_package PROPERTIES FIXTURES_SETUP exported_operators)
  add_test(NAME operators.run_from_a_package
    COMMAND lockstep_static_kv_tests --gtest_filter=ExportedOperators*)
  set_tests_properties(operators.run_from_a_package
    PROPERTIES LABELS quick TIMEOUT 60 FIXTURES_REQUIRED exported_operators ENVIRONMENT
    "LOCKSTEP_EXPORTED_OPS=${package};LOCKSTEP_TORCH_OPS=$<TARGET_FILE:lockstep_torch_ops>;AOTI_RUNTIME_CHECK_INPUTS=1")
endif()

# The Python package of the source tree, with the program of this build.
add_test(NAME python.package_searches_and_replays
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/python_package_test.py --program $<TARGET_FILE:lockstep>)
set_tests_properties(python.package_searches_and_replays PROPERTIES LABELS quick TIMEOUT 600)
add_test(NAME python.pip_install_and_pytest_find_a_bug
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/pip_install_check.py)
set_tests_properties(python.pip_install_and_pytest_find_a_bug
  PROPERTIES LABELS full TIMEOUT 3000 PROCESSORS 2 SKIP_RETURN_CODE 77)

# The report's pages in a browser, where there is one.
add_test(NAME report.pages_in_a_browser
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/report_browser_test.py --program $<TARGET_FILE:lockstep>)
set_tests_properties(report.pages_in_a_browser PROPERTIES LABELS full TIMEOUT 1200 SKIP_RETURN_CODE 77)

# Random requests to a server: a toy in Python, sound and broken in each way that it knows.
add_test(NAME python.server_search
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/server_search_test.py --program $<TARGET_FILE:lockstep>)
add_test(NAME python.server_search_at_length
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/server_search_test.py --program $<TARGET_FILE:lockstep> --full)
set_tests_properties(python.server_search PROPERTIES LABELS quick TIMEOUT 900)
set_tests_properties(python.server_search_at_length PROPERTIES LABELS full TIMEOUT 1800)

# llama-server, where `python3 fixtures/subjects/llama_cpp setup` has built it.
add_test(NAME subjects.llama_server_is_judged
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/llama_server_test.py $<TARGET_FILE:lockstep>)
set_tests_properties(subjects.llama_server_is_judged PROPERTIES LABELS full TIMEOUT 1800 SKIP_RETURN_CODE 77)

# transformers' generate and caches as a server, where `python3 fixtures/subjects/transformers setup` was run.
add_test(NAME subjects.transformers_is_judged
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/fixtures/subjects/transformers check $<TARGET_FILE:lockstep>)
set_tests_properties(subjects.transformers_is_judged PROPERTIES LABELS full TIMEOUT 3600 SKIP_RETURN_CODE 77)

# Qwen3 exported with fixed shapes, where `python3 fixtures/subjects/transformers setup` was run: packages are compiled
# once, and the table and the C++ runtime load them.
set(static_kv ${PROJECT_SOURCE_DIR}/fixtures/subjects/static_kv)
set(static_kv_packages ${PROJECT_BINARY_DIR}/static_kv)
add_test(NAME static_kv.packages
  COMMAND ${Python3_EXECUTABLE} ${static_kv} packages ${static_kv_packages} small)
add_test(NAME static_kv.is_the_original
  COMMAND ${Python3_EXECUTABLE} ${static_kv} check ${static_kv_packages})
add_test(NAME static_kv.table
  COMMAND ${Python3_EXECUTABLE} ${static_kv} table ${static_kv_packages}_full)
set_tests_properties(static_kv.packages PROPERTIES LABELS quick TIMEOUT 1200 SKIP_RETURN_CODE 77
  FIXTURES_SETUP static_kv_packages)
set_tests_properties(static_kv.is_the_original PROPERTIES LABELS quick TIMEOUT 900 SKIP_RETURN_CODE 77
  FIXTURES_REQUIRED static_kv_packages)
add_test(NAME static_kv.packages_at_length
  COMMAND ${Python3_EXECUTABLE} ${static_kv} packages ${static_kv_packages}_full)
set_tests_properties(static_kv.packages_at_length PROPERTIES LABELS full TIMEOUT 1200 SKIP_RETURN_CODE 77
  FIXTURES_SETUP static_kv_packages_full)
set_tests_properties(static_kv.table PROPERTIES LABELS full TIMEOUT 3600 SKIP_RETURN_CODE 77
  FIXTURES_REQUIRED static_kv_packages_full)
if(TARGET lockstep_static_kv)
  add_executable(lockstep_static_kv_tests
    properties/static_kv_runtime_torch_test.cpp properties/static_kv_graphs_torch_test.cpp
    properties/exported_operators_torch_test.cpp)
  target_link_libraries(lockstep_static_kv_tests PRIVATE
    lockstep_static_kv lockstep_reference lockstep_models GTest::gtest_main ${CMAKE_DL_LIBS})
  target_compile_options(lockstep_static_kv_tests PRIVATE -O1)  # its time is spent in LibTorch
  add_dependencies(lockstep_static_kv_tests lockstep_static_kv_generate)
  add_test(NAME static_kv.runtime COMMAND lockstep_static_kv_tests --gtest_filter=-ExportedOperators*:*Packages*)
  set_tests_properties(static_kv.runtime PROPERTIES LABELS quick TIMEOUT 600)
  # Tests of packages are skipped as a whole where there are none, so that ctest counts them as skipped.
  add_test(NAME static_kv.runtime_of_packages COMMAND lockstep_static_kv_tests --gtest_filter=StaticKv*Packages*)
  add_test(NAME static_kv.commands
    COMMAND ${Python3_EXECUTABLE} ${static_kv} command $<TARGET_FILE:lockstep_static_kv_generate>)
  set_tests_properties(static_kv.commands PROPERTIES LABELS quick TIMEOUT 900 SKIP_RETURN_CODE 77)
  add_test(NAME static_kv.packages_of_three_rows
    COMMAND ${Python3_EXECUTABLE} ${static_kv} packages ${static_kv_packages}_rows small rows=3)
  add_test(NAME static_kv.runtime_of_three_rows COMMAND lockstep_static_kv_tests --gtest_filter=StaticKv*Packages*)
  set_tests_properties(static_kv.packages_of_three_rows PROPERTIES LABELS full TIMEOUT 1200 SKIP_RETURN_CODE 77
    FIXTURES_SETUP static_kv_packages_rows)
  set_tests_properties(static_kv.runtime_of_three_rows PROPERTIES LABELS full TIMEOUT 600
    FIXTURES_REQUIRED static_kv_packages_rows
    ENVIRONMENT "LOCKSTEP_STATIC_KV=${static_kv_packages}_rows;AOTI_RUNTIME_CHECK_INPUTS=1")
  add_test(NAME static_kv.runtime_at_length COMMAND lockstep_static_kv_tests --gtest_filter=StaticKv*Packages*)
  set_tests_properties(static_kv.runtime_of_packages PROPERTIES LABELS quick TIMEOUT 600 FIXTURES_REQUIRED static_kv_packages
    ENVIRONMENT "LOCKSTEP_STATIC_KV=${static_kv_packages};AOTI_RUNTIME_CHECK_INPUTS=1")
  set_tests_properties(static_kv.runtime_at_length PROPERTIES LABELS full TIMEOUT 1200
    FIXTURES_REQUIRED static_kv_packages_full
    ENVIRONMENT "LOCKSTEP_STATIC_KV=${static_kv_packages}_full;AOTI_RUNTIME_CHECK_INPUTS=1")
  set_tests_properties(static_kv.runtime_of_packages static_kv.runtime_of_three_rows static_kv.runtime_at_length
    PROPERTIES SKIP_REGULAR_EXPRESSION "no packages: `python3")
endif()
if(TARGET lockstep_cuda_graph)  # the same tests over CUDA graphs, and their times (bench/static_kv_on_gpu.sh)
  add_executable(lockstep_static_kv_gpu_tests properties/static_kv_graphs_torch_test.cpp)
  add_executable(lockstep_static_kv_times bench/static_kv_times.cpp)
  add_executable(lockstep_graph_copy bench/initcheck_graph_copy.cu)  # what compute-sanitizer says of a copy in a graph
  foreach(target lockstep_static_kv_gpu_tests lockstep_static_kv_times)
    target_compile_definitions(${target} PRIVATE LOCKSTEP_STATIC_KV_GPU)
    target_compile_options(${target} PRIVATE -O1)
    target_link_libraries(${target} PRIVATE lockstep_cuda_graph $<TARGET_OBJECTS:lockstep_static_kv> lockstep_reference lockstep_models)
  endforeach()
  target_link_libraries(lockstep_static_kv_gpu_tests PRIVATE GTest::gtest_main)
  add_test(NAME static_kv.graphs_on_a_gpu COMMAND lockstep_static_kv_gpu_tests)
  set_tests_properties(static_kv.graphs_on_a_gpu PROPERTIES LABELS gpu TIMEOUT 600)
endif()

# A project of its own finds the installed package and sees the registered names.
add_test(NAME install.consumer_finds_lockstep
  COMMAND ${CMAKE_COMMAND} -D BINARY_DIR=${PROJECT_BINARY_DIR} -D SOURCE_DIR=${PROJECT_SOURCE_DIR}
          -D CONFIG=$<CONFIG> -D COMPILER=${CMAKE_CXX_COMPILER} -D FLAGS=${CMAKE_CXX_FLAGS}
          -P ${PROJECT_SOURCE_DIR}/cmake/consumer_test.cmake)
set_tests_properties(install.consumer_finds_lockstep PROPERTIES LABELS quick TIMEOUT 600)

# Inside another project our warnings are no errors and nvcc is not started.
add_test(NAME install.subproject_keeps_its_own_settings
  COMMAND ${CMAKE_COMMAND} -D BINARY_DIR=${PROJECT_BINARY_DIR} -D SOURCE_DIR=${PROJECT_SOURCE_DIR}
          -D COMPILER=${CMAKE_CXX_COMPILER} -P ${PROJECT_SOURCE_DIR}/cmake/subproject_test.cmake)
set_tests_properties(install.subproject_keeps_its_own_settings PROPERTIES LABELS quick TIMEOUT 120)

# The set-up brings every library that a source includes; README's commands do what stands there.
add_test(NAME setup.brings_what_is_included
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/setup_check.py $<TARGET_FILE:lockstep>)
add_test(NAME readme.commands_run
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/readme_check.py --build ${PROJECT_BINARY_DIR})
add_test(NAME program.help_is_true
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/help_check.py $<TARGET_FILE:lockstep>)
add_test(NAME program.minds_the_terminal
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/terminal_check.py $<TARGET_FILE:lockstep>)
add_test(NAME subjects.cpp_child_answers
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/cpp_child_check.py $<TARGET_FILE:lockstep> ${CMAKE_CXX_COMPILER})
add_test(NAME package.recipes_for_ci_work
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/recipes_check.py $<TARGET_FILE:lockstep>)
set_tests_properties(package.recipes_for_ci_work PROPERTIES LABELS quick TIMEOUT 600 SKIP_RETURN_CODE 77)
add_test(NAME package.debian_and_tarball_hold_the_program
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/package_check.py ${PROJECT_BINARY_DIR})
set_tests_properties(package.debian_and_tarball_hold_the_program
  PROPERTIES LABELS quick TIMEOUT 900 SKIP_RETURN_CODE 77)
add_test(NAME setup.texts_build_nothing_and_replay_goes_first
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/properties/script_check.py)
set_tests_properties(setup.brings_what_is_included readme.commands_run program.help_is_true subjects.cpp_child_answers
  program.minds_the_terminal setup.texts_build_nothing_and_replay_goes_first
  PROPERTIES LABELS quick TIMEOUT 600)

# The benchmark beside the peers goes on when one of them takes its process down.
add_test(NAME bench.a_peer_may_die
         COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/bench/peers/supervise.py selftest)
set_tests_properties(bench.a_peer_may_die PROPERTIES LABELS quick TIMEOUT 60)

# The measured figures of a kernel are of the sources that are there now, or the kernel is listed as pending.
foreach(word check selftest)
  add_test(NAME evidence.${word} COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/reports/evidence.py ${word})
  set_tests_properties(evidence.${word} PROPERTIES LABELS quick TIMEOUT 300)
  add_test(NAME evidence.static_kv_${word}
           COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/reports/static_kv.py ${word})
  set_tests_properties(evidence.static_kv_${word} PROPERTIES LABELS quick TIMEOUT 60)
endforeach()
add_test(NAME evidence.static_kv_programs
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/reports/static_kv.py programs)
set_tests_properties(evidence.static_kv_programs PROPERTIES LABELS full TIMEOUT 900 SKIP_RETURN_CODE 77)
