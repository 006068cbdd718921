# ctest: name=install.consumer_finds_lockstep labels=quick timeout=600
# Installs the build below itself, then configures, builds and runs properties/consumer against it.
# Its flags are those of the build, because objects with a sanitizer do not link without one.

set(prefix ${BINARY_DIR}/consumer/prefix)
set(build ${BINARY_DIR}/consumer/build)
file(REMOVE_RECURSE ${prefix} ${build})

foreach(command
    "--install;${BINARY_DIR};--prefix;${prefix};--config;${CONFIG}"
    "-G;Ninja;-S;${SOURCE_DIR}/properties/consumer;-B;${build};-DCMAKE_PREFIX_PATH=${prefix};-DCMAKE_BUILD_TYPE=${CONFIG};-DCMAKE_CXX_COMPILER=${COMPILER};-DCMAKE_CXX_FLAGS=${FLAGS}"
    "--build;${build}")
  execute_process(COMMAND ${CMAKE_COMMAND} ${command} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${build}/consumer OUTPUT_VARIABLE said COMMAND_ERROR_IS_FATAL ANY ECHO_OUTPUT_VARIABLE)
file(STRINGS ${prefix}/lib/cmake/lockstep/lockstepTargets.cmake with_cuda REGEX "CUDA::cudart_static")
if(with_cuda AND NOT said MATCHES "with tensors")
  message(FATAL_ERROR "headers of the package include CCCL's, which are not found where CUDA is")
endif()
execute_process(COMMAND ${prefix}/bin/lockstep list policies COMMAND_ERROR_IS_FATAL ANY)
if(EXISTS ${prefix}/bin/lockstep-judge)  # `lockstep` becomes it
  execute_process(COMMAND ${prefix}/bin/lockstep list operations COMMAND_ERROR_IS_FATAL ANY)
endif()
