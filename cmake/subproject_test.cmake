# Configures a project that adds Lockstep as a subdirectory, and looks at what that switched on.

set(folder ${BINARY_DIR}/subproject)
file(REMOVE_RECURSE ${folder})
file(WRITE ${folder}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(outer LANGUAGES CXX)
add_subdirectory(${SOURCE_DIR} lockstep)
foreach(name LOCKSTEP_WERROR LOCKSTEP_BUILD_TESTS LOCKSTEP_BUILD_BENCH LOCKSTEP_CUDA)
  if(\${\${name}})
    message(FATAL_ERROR \"\${name} is \${\${name}} inside another project\")
  endif()
endforeach()
add_executable(outer main.cpp)
target_link_libraries(outer PRIVATE lockstep::lockstep)
")
file(WRITE ${folder}/main.cpp "int main() {}\n")
execute_process(COMMAND ${CMAKE_COMMAND} -G Ninja -S ${folder} -B ${folder}/build -D CMAKE_CXX_COMPILER=${COMPILER}
                COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
