# ctest: name=install.subproject_keeps_its_own_settings labels=quick timeout=120
# Configures properties/consumer with FetchContent, compiles its file, and looks at what that switched on: inside another
# project our warnings are no errors, nvcc is not started, nothing of ours is built for tests or installed, and the
# build type is the project's own.

set(folder ${BINARY_DIR}/subproject)
file(REMOVE_RECURSE ${folder})
execute_process(COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SOURCE_DIR}/properties/consumer -B ${folder}
                        -D CMAKE_CXX_COMPILER=${COMPILER} -D FETCHCONTENT_SOURCE_DIR_LOCKSTEP=${SOURCE_DIR}
                        -D CONSUMER_FETCHES=ON
                COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
file(STRINGS ${folder}/CMakeCache.txt switches REGEX "^(LOCKSTEP_(WERROR|BUILD_TESTS|BUILD_BENCH|INSTALL|CUDA)|CMAKE_BUILD_TYPE):")
list(LENGTH switches count)
if(NOT count EQUAL 6)
  message(FATAL_ERROR "six switches were looked for: ${switches}")
endif()
foreach(switch IN LISTS switches)
  if(NOT switch MATCHES "=(OFF|off|)$")
    message(FATAL_ERROR "inside another project, ${switch}")
  endif()
endforeach()
execute_process(COMMAND ninja -C ${folder} -t commands consumer OUTPUT_VARIABLE commands COMMAND_ERROR_IS_FATAL ANY)
if(commands MATCHES "-Werror" OR commands MATCHES "nvcc" OR NOT commands MATCHES "-ffp-contract=off")
  message(FATAL_ERROR "inside another project, files are compiled with other flags than they should be")
endif()
execute_process(COMMAND ninja -C ${folder} CMakeFiles/consumer.dir/main.cpp.o COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
