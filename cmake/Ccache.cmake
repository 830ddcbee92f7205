# SPDX-License-Identifier: Apache-2.0
# Where ccache is installed, what was compiled before with the same compiler, options and sources comes
# from its cache, also in another clone. It keeps no compilation that failed, so warnings stay errors, and
# shows again what a compiler said.
find_program(TWELL_CCACHE_PROGRAM ccache)
mark_as_advanced(TWELL_CCACHE_PROGRAM)
if(TWELL_CCACHE AND TWELL_CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Compilers say which files they read (depend), so that no preprocessor runs first when nothing is
  # found. Precompiled headers need the sloppiness about macros and times: ccache then goes by what headers
  # contain.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${TWELL_CCACHE_PROGRAM})
  foreach(language C CXX CUDA)
    set(CMAKE_${language}_COMPILER_LAUNCHER ${launcher})
  endforeach()
  # clang writes the time of its source into a precompiled header otherwise.
  add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
  message(STATUS "TwELL: ccache compiles")
endif()
