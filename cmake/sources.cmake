# Sets `sources` to the project's files with one of the suffixes in `suffixes`, relative to SOURCE_DIR. git knows
# which files are ours; without git they are found by folder.

set(patterns ${suffixes})
list(TRANSFORM patterns PREPEND "*.")
execute_process(COMMAND git ls-files --cached --others --exclude-standard -- ${patterns}
                WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE text RESULT_VARIABLE failed ERROR_QUIET)
if(failed)
  foreach(folder reference kernels cache_sim properties bench)
    list(TRANSFORM patterns PREPEND "${SOURCE_DIR}/${folder}/" OUTPUT_VARIABLE globs)
    file(GLOB_RECURSE found RELATIVE ${SOURCE_DIR} ${globs})
    list(APPEND sources ${found})
  endforeach()
else()
  string(STRIP "${text}" text)
  string(REPLACE "\n" ";" sources "${text}")
endif()
set(listed ${sources})
set(sources "")
foreach(file IN LISTS listed)
  if(EXISTS ${SOURCE_DIR}/${file})  # git also lists what was deleted and not yet committed
    list(APPEND sources ${file})
  endif()
endforeach()
