# Fails where clang-format would change a file.

set(suffixes cpp hpp cu cuh)
include(${CMAKE_CURRENT_LIST_DIR}/sources.cmake)
execute_process(COMMAND clang-format --dry-run -Werror ${sources} WORKING_DIRECTORY ${SOURCE_DIR}
                COMMAND_ERROR_IS_FATAL ANY)
