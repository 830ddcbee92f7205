# SPDX-License-Identifier: Apache-2.0
# A room is a folder with one public header or a few, its sources, its tests and its benchmarks side
# by side. File names say what a file is: *_test.cc, *_bench.cc, *_fuzz.cc, *.cu; the rest is library.

add_library(twell_flags INTERFACE)
target_include_directories(twell_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(twell_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion>
  # A problem struct is filled by name; what is left out keeps its default.
  $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>)
# Highway compiles its code once per instruction set. AVX-512, AVX2 and the baseline (NEON on Arm) are
# worth the time, those in between are not; SVE cannot keep vectors in arrays, as our kernels do.
target_compile_definitions(twell_flags INTERFACE
  "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
if(TWELL_WERROR)
  target_compile_options(twell_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(TWELL_SANITIZE)
  target_compile_options(twell_flags INTERFACE -fsanitize=${TWELL_SANITIZE}
    -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(twell_flags INTERFACE -fsanitize=${TWELL_SANITIZE})
endif()
if(TWELL_FUZZ)
  target_compile_options(twell_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# The whole library, as its users link it.
add_library(twell_all INTERFACE)
add_library(twell::twell ALIAS twell_all)

if(TWELL_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()
if(TWELL_BENCH)
  find_package(benchmark REQUIRED)
endif()

# twell_test(file.cc library...): one test program. The file name gives its CTest label:
# *_slow_test -> slow, *_cuda_test -> gpu, the rest -> cpu.
function(twell_test file)
  get_filename_component(name ${file} NAME_WE)
  if(name MATCHES "_cuda_test$" AND NOT TWELL_HAVE_CUDA)
    return()
  endif()
  add_executable(${name} ${file})
  target_link_libraries(${name} PRIVATE twell_flags ${ARGN} GTest::gtest_main GTest::gmock)
  target_compile_definitions(${name} PRIVATE TWELL_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  set(label cpu)
  if(name MATCHES "_slow_test$")
    set(label slow)
  elseif(name MATCHES "_cuda_test$")
    set(label gpu)
  endif()
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT 1200)
endfunction()

# Kernels in *_sm90.cu use instructions of sm_90a alone; other *.cu run on sm_80 and later, with code
# of their own for sm_90, where dependent launches exist.
function(twell_cuda_architectures)
  foreach(file ${ARGN})
    if(file MATCHES "_sm90\\.cu$")
      set(options "-gencode=arch=compute_90a,code=sm_90a")
    elseif(file MATCHES "\\.cu$")
      set(options "-gencode=arch=compute_80,code=[sm_80,compute_80]"
                  "-gencode=arch=compute_90,code=sm_90")
    else()
      continue()
    endif()
    set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${options}")
  endforeach()
endfunction()

# twell_room(folder DEPS room... LIBS target... CUDA_LIBS target...)
# Makes the library twell_<folder with _ for />, linked to the rooms it may include from. A room's
# folders (ops/ffn/hopper) belong to it.
function(twell_room folder)
  cmake_parse_arguments(ROOM "" "" "DEPS;LIBS;CUDA_LIBS" ${ARGN})
  string(REPLACE "/" "_" suffix ${folder})
  set(target twell_${suffix})
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cc ${folder}/*/*.cc)
  file(GLOB tests CONFIGURE_DEPENDS ${folder}/*_test.cc ${folder}/*/*_test.cc)
  file(GLOB benches CONFIGURE_DEPENDS ${folder}/*_bench.cc ${folder}/*/*_bench.cc)
  file(GLOB fuzzers CONFIGURE_DEPENDS ${folder}/*_fuzz.cc ${folder}/*/*_fuzz.cc)
  file(GLOB cuda_only CONFIGURE_DEPENDS ${folder}/*_cuda*.cc ${folder}/*/*_cuda*.cc)
  list(REMOVE_ITEM sources ${tests} ${benches} ${fuzzers} ${cuda_only} "")
  if(TWELL_HAVE_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS
      ${folder}/*.cu ${folder}/*/*.cu ${folder}/*_cuda.cc ${folder}/*/*_cuda.cc)
    list(APPEND sources ${cuda_sources})
    twell_cuda_architectures(${cuda_sources})
    if(cuda_sources)
      list(APPEND ROOM_LIBS CUDA::cudart_static ${ROOM_CUDA_LIBS})
    endif()
  endif()

  set(deps ${ROOM_LIBS})
  foreach(dep ${ROOM_DEPS})
    string(REPLACE "/" "_" dep ${dep})
    list(APPEND deps twell_${dep})
  endforeach()

  if(sources)
    add_library(${target} STATIC ${sources})
    target_link_libraries(${target} PRIVATE twell_flags PUBLIC ${deps})
    target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${deps})
    target_include_directories(${target} INTERFACE ${PROJECT_SOURCE_DIR})
  endif()
  target_link_libraries(twell_all INTERFACE ${target})

  if(TWELL_TESTS)
    foreach(file ${tests})
      twell_test(${file} ${target})
    endforeach()
  endif()
  if(TWELL_BENCH)
    foreach(file ${benches})
      get_filename_component(name ${file} NAME_WE)
      add_executable(${name} ${file})
      target_link_libraries(${name} PRIVATE twell_flags ${target} benchmark::benchmark)
    endforeach()
  endif()
  if(TWELL_FUZZ)
    foreach(file ${fuzzers})
      get_filename_component(name ${file} NAME_WE)
      add_executable(${name} ${file})
      target_link_libraries(${name} PRIVATE twell_flags ${target})
      target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    endforeach()
  endif()
endfunction()
