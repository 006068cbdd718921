# Runs clang-tidy over the .cpp files of this build. Files that include Torch or CuTe stay out: their headers
# alone take minutes, and the findings are about those headers. Files are read without the precompiled header, which
# has the compiler's own format: an include that a file lacks is an error here.

cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
set(suffixes cpp)
include(${CMAKE_CURRENT_LIST_DIR}/sources.cmake)
file(READ ${BINARY_DIR}/compile_commands.json commands)
set(list "")
foreach(file IN LISTS sources)
  string(FIND "${commands}" "\"${SOURCE_DIR}/${file}\"" compiled)
  file(STRINGS ${SOURCE_DIR}/${file} heavy REGEX "^#include <(torch|ATen|c10|cute|cutlass)/" LIMIT_COUNT 1)
  if(NOT compiled EQUAL -1 AND NOT heavy)
    string(APPEND list "${SOURCE_DIR}/${file}\n")
  endif()
endforeach()
file(WRITE ${BINARY_DIR}/tidy_files.txt "${list}")
string(REGEX REPLACE " (-Winvalid-pch|(-Xclang )?-include(-pch)? (-Xclang )?[^ ]*cmake_pch[^ ]*)" "" commands "${commands}")
file(WRITE ${BINARY_DIR}/tidy/compile_commands.json "${commands}")
execute_process(COMMAND xargs -a ${BINARY_DIR}/tidy_files.txt -d "\\n" -n 1 -P ${cores}
                        clang-tidy --quiet -p ${BINARY_DIR}/tidy --extra-arg=-Wno-unknown-warning-option
                COMMAND_ERROR_IS_FATAL ANY)
