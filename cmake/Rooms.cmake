# SPDX-License-Identifier: Apache-2.0
# A room is a folder with a few public headers, its sources, tests and benchmarks. File names give a
# file's kind: *_test.cc, *_bench.cc, *_fuzz.cc, *.cu; all others belong to the library.

add_library(twell_flags INTERFACE)
target_include_directories(twell_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(twell_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion>
  # Problem structs use designated initializers; omitted members keep their defaults.
  $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>
  # An `omp simd` loop that clang does not vectorize is no mistake.
  $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>
  # GCC 13 and later suspect the members of an empty std::optional; GCC 12 and clang find real ones.
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Wno-maybe-uninitialized>
  # GCC 12 suspects the copies of short std::strings; AddressSanitizer finds real faults.
  "$<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread>")
# Highway compiles its code once per instruction set. AVX-512, AVX2 and the baseline (NEON on Arm)
# justify the build time, those in between do not. SVE has no arrays of vectors, as our kernels need.
target_compile_definitions(twell_flags INTERFACE
  "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
# fmt switches constexpr off under nvcc, and then its headers do not compile as C++20. Older nvcc
# cannot check format strings at compile time.
target_compile_definitions(twell_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<VERSION_LESS:${CMAKE_CUDA_COMPILER_VERSION}.0,13>>:FMT_CONSTEVAL=>)
# nvcc warns of a conversion to the same type although its `requires` rules that out (matrix.h).
target_compile_options(twell_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=554>)
if(TWELL_LINEINFO)
  target_compile_options(twell_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
endif()
if(TWELL_WERROR)
  target_compile_options(twell_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(TWELL_SANITIZE)
  target_compile_options(twell_flags INTERFACE -fsanitize=${TWELL_SANITIZE}
    -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(twell_flags INTERFACE -fsanitize=${TWELL_SANITIZE})
  find_program(twell_lld ld.lld)
  if(twell_lld)  # takes a third of the time of GNU ld
    target_link_options(twell_flags INTERFACE -fuse-ld=lld)
  endif()
  if(NOT TWELL_FUZZ)
    # These shorten the build. Undefined behaviour ends in a trap, which AddressSanitizer reports with
    # its stack, because a message of its own for every check is several times the code; the vptr
    # check cannot trap. Highway's code is for the build machine's instruction set alone; the release
    # build compiles and tests all of them.
    target_compile_options(twell_flags INTERFACE -fsanitize-trap=undefined -fno-sanitize=vptr
      -fsanitize-ignorelist=${PROJECT_SOURCE_DIR}/cmake/sanitizer_ignorelist.txt -march=native)
    target_compile_definitions(twell_flags INTERFACE HWY_COMPILE_ONLY_STATIC)
  endif()
endif()
if(TWELL_FUZZ)
  target_compile_options(twell_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# With CMAKE_UNITY_BUILD (the preset asan, and scripts/test.sh) the sources of a target are one
# translation unit, which parses headers and instantiates templates once: half the compiler's time. So
# names in unnamed namespaces of a room's C++ must differ, as must those of its *.cu, of its CPU tests and
# of its GPU tests. A missing include, which such a unit hides, is found by scripts/check_includes.py.
if(CMAKE_UNITY_BUILD)
  # GCC takes the sources within such a unit for headers, whose types should not have parts without linkage.
  target_compile_options(twell_flags INTERFACE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()

# The whole library, as its users link it.
add_library(twell_all INTERFACE)
add_library(twell::twell ALIAS twell_all)
add_custom_target(twell_library)

if(TWELL_TESTS)
  find_package(GTest REQUIRED)
endif()
if(TWELL_BENCH)
  find_package(benchmark REQUIRED)
endif()

# Rooms that compute little, and such files of others: the sanitizer build compiles them with -O0, in a
# third of the compiler's time.
set(twell_light_rooms)
set(twell_light_files)
if(TWELL_SANITIZE AND NOT TWELL_FUZZ)
  set(twell_light_rooms bench chat_template data dist grammar infer serve tasks train)
  set(twell_light_files base/json_fields.cc base/option.cc checkpoint/checkpoint.cc
    checkpoint/config_json.cc checkpoint/convert.cc
    checkpoint/safetensors.cc tokenizer/tokenizer_json.cc tokenizer/tokenizer_spec.cc)
endif()
# The build with tests and precompiled headers (preset dev): rooms in which nothing is timed with -O0,
# which takes GCC 40% less time, and with -O1 those that do not compute.
set(twell_quick_rooms)
if(TWELL_TESTS AND TWELL_PRECOMPILE AND NOT TWELL_SANITIZE)
  set(twell_light_rooms bench chat_template data dist grammar serve tasks train)
  set(twell_quick_rooms base checkpoint infer model parquet tokenizer)
endif()

# Precompiled headers of the library: a small source takes longer to parse these than to compile.
# scripts/check_includes.py finds a source that relies on them without including them.
if(TWELL_PRECOMPILE)
  # GCC frees memory from 512 MB on instead of 128, which takes some 8% less time.
  target_compile_options(twell_flags INTERFACE
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:--param ggc-min-heapsize=524288>")
  file(WRITE ${PROJECT_BINARY_DIR}/library_header.cc "")
  foreach(header twell_library_header twell_light_header twell_quick_header)
    add_library(${header} OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/library_header.cc)
    target_link_libraries(${header} PRIVATE twell_flags fmt::fmt OpenMP::OpenMP_CXX
      nlohmann_json::nlohmann_json)
    target_precompile_headers(${header} PRIVATE <fmt/format.h> <nlohmann/json.hpp> <algorithm>
      <array> <atomic> <chrono> <cmath> <cstring> <filesystem> <fstream> <functional> <limits> <map>
      <memory> <mutex> <optional> <set> <span> <sstream> <string> <thread> <unordered_map> <variant>
      <vector>)
  endforeach()
  target_compile_options(twell_light_header PRIVATE -O0)
  target_compile_options(twell_quick_header PRIVATE -O1)
endif()
function(twell_precompile target header)
  if(TWELL_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM ${header})
  endif()
endfunction()
# A program with the libraries' precompiled header is position-independent as libraries are.
function(twell_precompile_program target header)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
  twell_precompile(${target} ${header})
endfunction()

# Precompiled headers of tests: parsing GoogleTest and the standard library takes longer than compiling
# a test. GCC uses one only with identical macros and options, so every test gets the options of every
# third-party library. Tests that compute themselves are compiled with -O1, because they are longer to
# compile than to run, all others with -O0, which takes a third of the compiler's time; the library under
# test is optimised as always.
if(TWELL_TESTS)
  # The sanitizer build looks for undefined behaviour in the library, which takes a third of the
  # compiler's time, and not in tests; for bad addresses in both.
  add_library(twell_test_flags INTERFACE)
  if(TWELL_SANITIZE MATCHES "undefined")
    target_compile_options(twell_test_flags INTERFACE -fno-sanitize=undefined)
  endif()
  set(twell_test_libraries twell_flags twell_test_flags GTest::gtest_main GTest::gmock fmt::fmt
    OpenMP::OpenMP_CXX PkgConfig::hwy PkgConfig::utf8proc twell::cudnn)
  file(WRITE ${PROJECT_BINARY_DIR}/test_header.cc "int main() { return 0; }\n")
  set(twell_test_options_0 -O0)
  set(twell_test_options_1 $<$<CONFIG:Release>:-O1>)
  foreach(level 0 1)
    set(header twell_test_header_O${level})
    add_executable(${header} EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/test_header.cc)
    target_link_libraries(${header} PRIVATE ${twell_test_libraries})
    target_compile_options(${header} PRIVATE ${twell_test_options_${level}})
    target_compile_definitions(${header} PRIVATE TWELL_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    target_precompile_headers(${header} PRIVATE <gmock/gmock.h> <gtest/gtest.h> <algorithm>
      <cmath> <filesystem> <functional> <map> <memory> <random> <span> <string> <vector>)
  endforeach()
endif()

# Where scripts/test.sh runs a test is said by its labels. cpu: in the sanitizer build. In the release
# build: simd, because optimisation and instruction sets matter; cli, because it runs the command
# for long; gpu, because it needs one (without a GPU it skips with a reason).
add_custom_target(twell_release_tests)

# twell_ctest(name "labels" command...): a test with its labels; exit code 77 means skipped. A
# sanitizer build has only those labelled cpu.
function(twell_ctest name labels)
  if(TWELL_SANITIZE AND NOT labels MATCHES "cpu")
    return()
  endif()
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 1200 SKIP_RETURN_CODE 77)
  if(TWELL_SANITIZE)
    # OpenMP's thread pool and oneDNN's caches live until exit, so leaks are not looked for.
    set_tests_properties(${name} PROPERTIES ENVIRONMENT
      "ASAN_OPTIONS=detect_leaks=0:handle_sigill=1")
  endif()
  if(labels MATCHES "gpu")
    # Some compare the GPU's free memory before and after, so one runs at a time.
    set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu)
  endif()
endfunction()

# twell_rooms_below(out library...): the rooms among these libraries and below, those that are -O0 last.
function(twell_rooms_below out)
  set(found)
  set(light)
  set(seen)
  set(todo ${ARGN})
  while(todo)
    list(POP_FRONT todo room)
    string(REGEX REPLACE "^\\$<LINK_ONLY:(.*)>$" "\\1" room "${room}")
    if(NOT room MATCHES "^twell_" OR NOT TARGET ${room} OR room IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${room})
    get_target_property(type ${room} TYPE)
    string(REGEX REPLACE "^twell_" "" suffix ${room})
    if(type STREQUAL "STATIC_LIBRARY")
      if(suffix IN_LIST twell_light_rooms OR suffix MATCHES "_light$")
        list(APPEND light $<TARGET_FILE:${room}>)
      else()
        list(APPEND found $<TARGET_FILE:${room}>)
      endif()
    endif()
    get_target_property(below ${room} INTERFACE_LINK_LIBRARIES)
    if(below)
      list(APPEND todo ${below})
    endif()
  endwhile()
  set(${out} ${found} ${light} PARENT_SCOPE)
endfunction()

# twell_test(name "labels" "files" library...): a program of GoogleTest as a test.
function(twell_test name labels files)
  if(TWELL_SANITIZE AND NOT labels MATCHES "cpu")
    return()
  endif()
  add_executable(${name} ${files})
  target_link_libraries(${name} PRIVATE ${twell_test_libraries} ${ARGN})
  target_compile_definitions(${name} PRIVATE TWELL_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  set(level 1)
  if(labels MATCHES "cli" OR (labels STREQUAL "gpu" AND TWELL_NO_GPU))
    set(level 0)
  elseif(TWELL_SANITIZE AND NOT name MATCHES "^(ops_(matmul|attention|ffn|ffn_train)|model)_test")
    set(level 0)
  endif()
  if(TWELL_SANITIZE)
    # Of a template that several objects instantiate the linker keeps the first, which should not be
    # the test's: it takes three times as long to run, and has fewer checks.
    twell_rooms_below(rooms ${ARGN})
    target_link_options(${name} PRIVATE -Wl,--whole-archive ${rooms} -Wl,--no-whole-archive)
  endif()
  target_compile_options(${name} PRIVATE ${twell_test_options_${level}})
  target_precompile_headers(${name} REUSE_FROM twell_test_header_O${level})
  twell_ctest(${name} "${labels}" ${name} --gtest_brief=1)
  if(labels MATCHES "simd|cli|gpu")
    add_dependencies(twell_release_tests ${name})
  endif()
endfunction()

# twell_room_tests(room "files" library...): the room's tests as one program, <room>_test, and its
# GPU tests, *_cuda_test.cc, as another, <room>_cuda_test.
function(twell_room_tests room files)
  set(gpu_files ${files})
  list(FILTER gpu_files INCLUDE REGEX "_cuda_test\\.cc$")
  list(FILTER files EXCLUDE REGEX "_cuda_test\\.cc$")
  set(labels cpu)
  if(room MATCHES "^(ops_|format)")
    list(APPEND labels simd)
  elseif(room STREQUAL "rooms")
    set(labels simd)
  endif()
  if(files)
    twell_test(${room}_test "${labels}" "${files}" ${ARGN})
  endif()
  if(gpu_files AND TWELL_HAVE_CUDA)
    twell_test(${room}_cuda_test gpu "${gpu_files}" ${ARGN})
  endif()
endfunction()

# Which GPUs a CUDA source is for is in its name. Kernels in *_sm90.cu use instructions of Hopper that
# no other GPU has (9.0a). All other *.cu are portable, from compute capability 8.0 on: they have
# machine code for the capabilities in TWELL_CUDA_ARCHITECTURES, and PTX of 8.0, which the driver
# compiles for other GPUs when the program starts. The code for 9.0 and later has programmatic
# dependent launch besides. A portable build has neither *_sm90.cu, in whose place it compiles a
# room's without_sm90_cuda.cc, nor such code: what it has for 9.0 and later is made of the PTX of 8.0.
set(twell_release_architectures 80 86 89 90 100 120)
set(twell_architectures ${TWELL_CUDA_ARCHITECTURES})
if(twell_architectures STREQUAL "release")
  set(twell_architectures ${twell_release_architectures})
endif()
if(NOT TWELL_PORTABLE AND NOT 90 IN_LIST twell_architectures)
  list(APPEND twell_architectures 90)  # Hopper's kernels run beside portable code for 9.0 alone
endif()
set(twell_portable_code)
set(twell_codes_of_80 compute_80)
foreach(architecture ${twell_architectures})
  if(NOT architecture MATCHES "^(8[0-9]|90|1[0-9][0-9])$")
    message(FATAL_ERROR "TWELL_CUDA_ARCHITECTURES=${TWELL_CUDA_ARCHITECTURES}: ${architecture} is no "
      "compute capability of 8.0 or later, such as 80, 89 or 120; release stands for "
      "${twell_release_architectures}")
  endif()
  if(architecture EQUAL 80 OR TWELL_PORTABLE)
    list(INSERT twell_codes_of_80 0 sm_${architecture})
  else()
    list(APPEND twell_portable_code "-gencode=arch=compute_${architecture},code=sm_${architecture}")
  endif()
endforeach()
if(twell_codes_of_80 STREQUAL "compute_80")
  list(INSERT twell_portable_code 0 "-gencode=arch=compute_80,code=compute_80")
else()
  list(JOIN twell_codes_of_80 "," twell_codes_of_80)
  list(INSERT twell_portable_code 0 "-gencode=arch=compute_80,code=[${twell_codes_of_80}]")
endif()
if(TWELL_HAVE_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  foreach(architecture ${twell_architectures})
    if(architecture GREATER 90)
      message(FATAL_ERROR "TWELL_CUDA_ARCHITECTURES=${TWELL_CUDA_ARCHITECTURES}: machine code for "
        "${architecture} needs CUDA 12.8 or later, this is ${CMAKE_CUDA_COMPILER_VERSION}")
    endif()
  endforeach()
endif()
list(JOIN twell_architectures "," twell_machine_code)  # for what `twell doctor` says
if(TWELL_PORTABLE)
  add_compile_definitions(TWELL_PORTABLE)
endif()
# With TWELL_NO_GPU sources that differ between GPUs have PTX of 8.0, as one unit (twell_ptx_of_80), all
# others machine code alone, and all tests of GPU code are -O0.
set_property(GLOBAL PROPERTY twell_differs)
function(twell_cuda_architectures)
  foreach(file ${ARGN})
    if(file MATCHES "_sm90\\.cu$")
      set(options "-gencode=arch=compute_90a,code=sm_90a")
    elseif(file MATCHES "\\.cu$")
      set(options ${twell_portable_code})
      if(TWELL_NO_GPU)
        list(FILTER options EXCLUDE REGEX "code=compute_80$")
      endif()
    else()
      continue()
    endif()
    set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${options}")
  endforeach()
endfunction()

# twell_cuda_unit(name out "file"...): a unit that includes these files of the project.
function(twell_cuda_unit name out)
  set(text)
  foreach(file ${ARGN})
    file(RELATIVE_PATH file ${PROJECT_SOURCE_DIR} ${file})
    string(APPEND text "#include \"${file}\"\n")
  endforeach()
  set(unit ${CMAKE_CURRENT_BINARY_DIR}/units/${name}.cu)
  file(CONFIGURE OUTPUT ${unit} CONTENT "${text}" @ONLY)
  set(${out} ${unit} PARENT_SCOPE)
endfunction()

# *.cu of several rooms are one unit of a room that all of them depend on, since each by itself takes nvcc
# longer for headers than for its kernels. What they call is of that room, or of those below.
set(twell_shared_base gpu/machine_code.cu gpu/measure_device.cu format/byte_matrix.cu
  ops/decode/gate_screen.cu ops/embedding/embedding.cu ops/rms_norm/rms_norm.cu ops/rope/rope.cu
  ops/bias/bias.cu ops/adamw/adamw.cu model/tensor_upload.cu infer/sampler.cu)
set(twell_shared_gpu ops/skinny/batch_ops_sm90.cu ops/ffn_train/weight_grads_sm90.cu
  ops/decode/decode_bytes_bytes_sm90.cu ops/decode/decode_bytes_wide_sm90.cu
  ops/decode/decode_layers_sm90.cu ops/decode/decode_wide_bytes_sm90.cu
  ops/decode/decode_wide_wide_sm90.cu)
set(twell_shared_ops_matmul ops/cross_entropy/cross_entropy.cu ops/muon/muon.cu)
if(TWELL_PORTABLE)
  set(twell_shared_gpu)
endif()
foreach(suffix base gpu ops_matmul)
  list(TRANSFORM twell_shared_${suffix} PREPEND ${PROJECT_SOURCE_DIR}/twell/)
endforeach()

# twell_cuda_units(suffix out source...): with CMAKE_UNITY_BUILD, the room's *.cu as units of ten, of
# Hopper's kernels and of portable ones; nvcc parses headers up to three times per unit, which takes
# longer than most kernels. Names in unnamed namespaces of these differ, as in C++ units. The list `out`
# has the units in the place of their sources.
function(twell_cuda_units suffix out)
  set(all ${ARGN})
  set(differs ${all})
  list(FILTER differs INCLUDE REGEX "\\.cu$")
  list(FILTER differs EXCLUDE REGEX "_sm90\\.cu$")
  foreach(file ${differs})
    file(STRINGS ${file} lines REGEX "__CUDA_ARCH__" LIMIT_COUNT 1)
    if(lines)
      set_property(GLOBAL APPEND PROPERTY twell_differs ${file})
    endif()
  endforeach()
  if(CMAKE_UNITY_BUILD)
    list(REMOVE_ITEM all ${twell_shared_base} ${twell_shared_gpu} ${twell_shared_ops_matmul} "")
    if(twell_shared_${suffix})
      set(kind portable)
      if(suffix STREQUAL "gpu")
        set(kind sm90)
      endif()
      twell_cuda_unit(shared_${suffix}_${kind} unit ${twell_shared_${suffix}})
      list(APPEND all ${unit})
    endif()
  endif()
  foreach(kind sm90 portable)
    set(files ${all})
    list(FILTER files INCLUDE REGEX "\\.cu$")
    if(kind STREQUAL "sm90")
      list(FILTER files INCLUDE REGEX "_sm90\\.cu$")
    else()
      list(FILTER files EXCLUDE REGEX "_sm90\\.cu$")
    endif()
    list(LENGTH files count)
    if(NOT CMAKE_UNITY_BUILD OR count LESS 2)
      continue()
    endif()
    list(REMOVE_ITEM all ${files})
    math(EXPR last "(${count} - 1) / 10")
    foreach(index RANGE ${last})
      math(EXPR begin "${index} * 10")
      list(SUBLIST files ${begin} 10 part)
      twell_cuda_unit(${suffix}_${index}_${kind} unit ${part})
      list(APPEND all ${unit})
    endforeach()
  endforeach()
  set(${out} ${all} PARENT_SCOPE)
endfunction()

# twell_ptx_of_80(): after all rooms. What code for GPUs without code of their own has other than that
# for 9.0, compiled for its faults.
function(twell_ptx_of_80)
  get_property(files GLOBAL PROPERTY twell_differs)
  if(NOT TWELL_NO_GPU OR NOT TWELL_HAVE_CUDA OR NOT "${twell_portable_code}" MATCHES "code=compute_80(;|$)")
    return()
  endif()
  twell_cuda_unit(differs_portable unit ${files})
  add_library(twell_ptx_of_80 OBJECT ${unit})
  set_target_properties(twell_ptx_of_80 PROPERTIES CUDA_PTX_COMPILATION ON)
  set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "-gencode=arch=compute_80,code=compute_80")
  target_link_libraries(twell_ptx_of_80 PRIVATE twell_flags ${ARGN})
  add_dependencies(twell_library twell_ptx_of_80)
endfunction()

# twell_room(folder DEPS room... LIBS target... CUDA_LIBS target...)
# Defines the library twell_<folder with _ for />, linked to the rooms whose headers it may include.
# Subfolders (ops/ffn/tile_union) belong to the room.
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
    if(TWELL_PORTABLE)
      list(FILTER cuda_sources EXCLUDE REGEX "_sm90\\.cu$")
    else()
      list(FILTER cuda_sources EXCLUDE REGEX "/without_sm90_cuda\\.cc$")
    endif()
    twell_cuda_units(${suffix} cuda_sources ${cuda_sources})
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

  # Highway includes some files once for each instruction set, so they stay units of their own; CMake
  # makes no units of CUDA sources.
  foreach(file ${sources})
    file(STRINGS ${file} highway REGEX "foreach_target" LIMIT_COUNT 1)
    if(highway OR file MATCHES "\\.cu$")
      set_source_files_properties(${file} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  set(light_files)
  foreach(file ${twell_light_files})
    if(${CMAKE_CURRENT_SOURCE_DIR}/${file} IN_LIST sources)
      list(APPEND light_files ${file})
      list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${file})
    endif()
  endforeach()
  if(sources)
    add_library(${target} STATIC ${sources})
    target_link_libraries(${target} PRIVATE twell_flags PUBLIC ${deps})
    if(suffix IN_LIST twell_light_rooms)
      target_compile_options(${target} PRIVATE -O0)
      twell_precompile(${target} twell_light_header)
    elseif(suffix IN_LIST twell_quick_rooms)
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
      twell_precompile(${target} twell_quick_header)
    else()
      twell_precompile(${target} twell_library_header)
    endif()
    target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
    if(light_files)
      # A library of its own, so that tests can link the optimised objects first.
      add_library(${target}_light STATIC ${light_files})
      target_link_libraries(${target}_light PRIVATE twell_flags ${target})
      target_link_libraries(${target} PRIVATE ${target}_light)
      target_compile_options(${target}_light PRIVATE -O0)
      twell_precompile(${target}_light twell_light_header)
    endif()
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${deps})
    target_include_directories(${target} INTERFACE ${PROJECT_SOURCE_DIR})
  endif()
  target_link_libraries(twell_all INTERFACE ${target})
  add_dependencies(twell_library ${target})

  if(TWELL_TESTS)
    twell_room_tests(${suffix} "${tests}" ${target})
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
      target_link_options(${name} PRIVATE -fsanitize=fuzzer -Wl,--as-needed)
    endforeach()
  endif()
endfunction()
