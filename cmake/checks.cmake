# Checks: scripts, and some tests of a program. A line in a script's head says which test of ctest it is:
#
#   # ctest: name=program.help_is_true labels=quick timeout=600 skip=77 args="{lockstep} --quiet"
#
# name, labels and timeout are always there. Properties of ctest have ctest's names: processors, environment,
# fixtures_setup, fixtures_required. More words: args, of the command line; skip, the exit status or the text with which
# it says that it cannot run here; python=torch, it imports PyTorch; program, run instead of the script; needs={TARGET}.
# {lockstep} and other targets are paths of programs, and without the program there is no such test; {build} is the build
# folder, {cxx} the compiler.
set(check_properties labels timeout processors environment fixtures_setup fixtures_required)
set(check_words name ${check_properties} args skip python program needs)
set(check_targets lockstep lockstep_tests lockstep_tests_gpu lockstep_torch_tests lockstep_torch_ops
                  lockstep_static_kv_tests lockstep_static_kv_gpu_tests lockstep_static_kv_generate
                  lockstep_numbers_torch_tests)

# Fails with a sentence that names the file and the number of the line `text` in it.
function(lockstep_check_fails file text sentence)
  file(READ ${PROJECT_SOURCE_DIR}/${file} whole)
  string(FIND "${whole}" "${text}" end)
  string(SUBSTRING "${whole}" 0 ${end} before)
  string(REGEX MATCHALL "\n" newlines "${before}\n")
  list(LENGTH newlines number)
  string(REPLACE ";" ", " sentence "${sentence}")
  message(FATAL_ERROR "${file}:${number}: ${sentence}")
endfunction()

function(lockstep_check file text)
  foreach(word IN LISTS check_words)
    set(${word} "")
  endforeach()
  string(REGEX REPLACE "^# ctest: " "" settings "${text}")
  separate_arguments(settings UNIX_COMMAND "${settings}")
  foreach(setting IN LISTS settings)
    if(NOT setting MATCHES "^([a-z_]+)=(.+)$" OR NOT CMAKE_MATCH_1 IN_LIST check_words)
      lockstep_check_fails(${file} "${text}" "`${setting}` is not WORD=VALUE, with one of the words ${check_words}")
    endif()
    set(word ${CMAKE_MATCH_1})
    string(REPLACE "{build}" "${PROJECT_BINARY_DIR}" value "${CMAKE_MATCH_2}")
    string(REPLACE "{cxx}" "${CMAKE_CXX_COMPILER}" value "${value}")
    foreach(target IN LISTS check_targets)
      if(value MATCHES "{${target}}" AND NOT TARGET ${target})
        set(missing ${target})
      endif()
      string(REPLACE "{${target}}" "$<TARGET_FILE:${target}>" value "${value}")
    endforeach()
    if(value MATCHES "{[^}]*}")
      lockstep_check_fails(${file} "${text}" "${CMAKE_MATCH_0} is none of build, cxx, ${check_targets}")
    endif()
    set(${word} "${value}")
  endforeach()
  if(NOT name OR NOT labels MATCHES "^(quick|full|gpu)$" OR NOT timeout MATCHES "^[0-9]+$" OR NOT python MATCHES "^(torch)?$")
    lockstep_check_fails(${file} "${text}" "name=NAME, labels=quick, full or gpu, timeout=SECONDS and python=torch are possible")
  elseif(TEST ${name})
    lockstep_check_fails(${file} "${text}" "there is a test ${name} already")
  elseif(missing)
    return()
  endif()
  string(REGEX REPLACE "/__main__\\.py$" "" script ${PROJECT_SOURCE_DIR}/${file})
  if(program)
    set(command ${program})
  elseif(file MATCHES "\\.cmake$")
    set(command ${CMAKE_COMMAND} -D BINARY_DIR=${PROJECT_BINARY_DIR} -D SOURCE_DIR=${PROJECT_SOURCE_DIR} -D CONFIG=$<CONFIG>
                -D COMPILER=${CMAKE_CXX_COMPILER} -D FLAGS=${CMAKE_CXX_FLAGS} -P ${script})
  elseif(python)
    set(command ${PROJECT_SOURCE_DIR}/properties/support/torch_python.sh ${script})
    set(environment LOCKSTEP_TORCH_DIR=${LOCKSTEP_TORCH_DIR})
  else()
    set(command ${Python3_EXECUTABLE} ${script})
  endif()
  separate_arguments(args UNIX_COMMAND "${args}")
  separate_arguments(environment UNIX_COMMAND "${environment}")
  add_test(NAME ${name} COMMAND ${command} ${args})
  foreach(property IN LISTS check_properties)
    if(${property})
      string(TOUPPER ${property} known)
      set_property(TEST ${name} PROPERTY ${known} ${${property}})
    endif()
  endforeach()
  set_property(TEST ${name} PROPERTY COST ${timeout})  # checks before tests of a second, so that none is left alone
  if(skip MATCHES "^[0-9]+$")
    set_property(TEST ${name} PROPERTY SKIP_RETURN_CODE ${skip})
  elseif(skip)
    set_property(TEST ${name} PROPERTY SKIP_REGULAR_EXPRESSION ${skip})
  endif()
endfunction()

file(GLOB_RECURSE check_files CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} properties/*.py bench/*.py reports/*.py
                                                fixtures/subjects/__main__.py cmake/*_test.cmake)
foreach(file IN LISTS check_files)
  file(STRINGS ${PROJECT_SOURCE_DIR}/${file} lines REGEX "^# *ctest *:")
  foreach(line IN LISTS lines)
    lockstep_check(${file} "${line}")
  endforeach()
  if(lines)  # another line there configures anew
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  elseif(file MATCHES "_(test|check)\\.(py|cmake)$")
    message(FATAL_ERROR "${file}: a check says in its head which test it is: `# ctest: name=… labels=… timeout=…`")
  endif()
endforeach()

# Some tests of a program. Many of LibTorch's are one test of ctest: each start of the program loads LibTorch anew. Tests
# of packages are skipped as a whole where there are none. What kernels say of arguments that they refuse needs no GPU.
foreach(line IN ITEMS
    "name=reference.agrees_with_libtorch labels=quick timeout=600 program={lockstep_torch_tests} args=--gtest_filter=-RecurrenceAccuracy.*:TorchOps*"
    "name=reference.accuracy_by_length labels=full timeout=600 program={lockstep_torch_tests} args=--gtest_filter=RecurrenceAccuracy.*"
    "name=operators.keep_their_contract labels=quick timeout=600 program={lockstep_torch_tests} args=--gtest_filter=TorchOps*"
    "name=operators.run_from_a_package labels=full timeout=60 program={lockstep_static_kv_tests} args=--gtest_filter=ExportedOperators* fixtures_required=exported_operators environment=\"LOCKSTEP_EXPORTED_OPS={build}/exported_operators LOCKSTEP_TORCH_OPS={lockstep_torch_ops} AOTI_RUNTIME_CHECK_INPUTS=1\""
    "name=numbers.of_tensors labels=quick timeout=600 program={lockstep_numbers_torch_tests} args=--gtest_filter=-*InFull.*"
    "name=numbers.of_tensors_in_full labels=full timeout=7200 program={lockstep_numbers_torch_tests} args=--gtest_filter=*InFull.*"
    "name=static_kv.runtime labels=quick timeout=600 program={lockstep_static_kv_tests} args=--gtest_filter=-ExportedOperators*:*Packages*:*Original/tied"
    "name=static_kv.runtime_of_tied_heads labels=full timeout=600 program={lockstep_static_kv_tests} args=--gtest_filter=*Original/tied"
    "name=static_kv.runtime_of_packages labels=quick timeout=600 program={lockstep_static_kv_tests} args=--gtest_filter=StaticKv*Packages* fixtures_required=static_kv_packages skip=\"no packages: `python3\" environment=\"LOCKSTEP_STATIC_KV={build}/static_kv AOTI_RUNTIME_CHECK_INPUTS=1\""
    "name=static_kv.runtime_of_three_rows labels=full timeout=600 program={lockstep_static_kv_tests} args=--gtest_filter=StaticKv*Packages* fixtures_required=static_kv_packages_rows skip=\"no packages: `python3\" environment=\"LOCKSTEP_STATIC_KV={build}/static_kv_rows AOTI_RUNTIME_CHECK_INPUTS=1\""
    "name=static_kv.runtime_at_length labels=full timeout=1200 program={lockstep_static_kv_tests} args=--gtest_filter=StaticKv*Packages* fixtures_required=static_kv_packages_full skip=\"no packages: `python3\" environment=\"LOCKSTEP_STATIC_KV={build}/static_kv_full AOTI_RUNTIME_CHECK_INPUTS=1\""
    "name=static_kv.graphs_on_a_gpu labels=gpu timeout=600 program={lockstep_static_kv_gpu_tests}"
    "name=kernels.refuse_arguments_by_name labels=full timeout=60 program={lockstep_tests_gpu} args=--gtest_filter=*Arguments.*")
  lockstep_check(cmake/checks.cmake "# ctest: ${line}")
endforeach()
