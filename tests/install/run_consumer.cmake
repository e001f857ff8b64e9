# Installs `build` into an empty prefix below `work`, then configures, builds and runs the project `source` against
# it. With `with_server` the installed programs have to start as well.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nended with ${result}:\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${work})
set(prefix ${work}/prefix)
run(${CMAKE_COMMAND} --install ${build} --prefix ${prefix})
run(${CMAKE_COMMAND} -G Ninja -S ${source} -B ${work}/build -D CMAKE_PREFIX_PATH=${prefix}
  -D CMAKE_CXX_COMPILER=${compiler} -D CMAKE_CXX_COMPILER_LAUNCHER=${launcher} -D CMAKE_BUILD_TYPE=${build_type})
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)
if(with_server)
  run(${prefix}/bin/ctkvrd --help)
  run(${prefix}/bin/ctkvr-cli --help)
endif()
