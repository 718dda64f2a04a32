# cmake -DFROM=<build folder> -DTO=<prefix> -P install.cmake
file(REMOVE_RECURSE ${TO} ${TO}_before_move)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${FROM} --prefix ${TO}_before_move COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${TO}_before_move ${TO})
