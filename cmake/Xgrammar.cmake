# SPDX-License-Identifier: Apache-2.0
# XGrammar's C++ core (sources fetched by scripts/setup.sh) as a static library. Without the sources,
# the room grammar/ refuses every grammar with a reason.
set(xgrammar_root ${PROJECT_SOURCE_DIR}/.cache/xgrammar)
set(TWELL_XGRAMMAR_LIBRARY "" CACHE FILEPATH
  "libxgrammar.a of another build folder, which is linked instead of compiling XGrammar again")
set(xgrammar_includes ${xgrammar_root}/include ${xgrammar_root}/3rdparty/picojson
  ${xgrammar_root}/3rdparty/dlpack/include)
# Compiles a copy of the source in which `old` is `new`.
macro(xgrammar_mend file old new)
  file(READ ${xgrammar_root}/cpp/${file} mended)
  string(FIND "${mended}" "${old}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "cmake/Xgrammar.cmake mends ${file} of XGrammar 0.2.8, and ${xgrammar_root} has another one")
  endif()
  string(REPLACE "${old}" "${new}" mended "${mended}")
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/xgrammar/${file} CONTENT "${mended}" @ONLY)
  list(REMOVE_ITEM xgrammar_sources ${xgrammar_root}/cpp/${file})
  list(APPEND xgrammar_sources ${PROJECT_BINARY_DIR}/xgrammar/${file})
endmacro()
if(EXISTS ${xgrammar_root}/version)
  if(TWELL_XGRAMMAR_LIBRARY)
    add_library(xgrammar STATIC IMPORTED GLOBAL)
    set_target_properties(xgrammar PROPERTIES IMPORTED_LOCATION ${TWELL_XGRAMMAR_LIBRARY})
  else()
    file(GLOB_RECURSE xgrammar_sources CONFIGURE_DEPENDS ${xgrammar_root}/cpp/*.cc)
    # Two faults of 0.2.8 in regular expressions, which are mended in copies of its sources. An
    # optional group could begin in its middle, "(b[0-9]+)?" with a digit, because its first state was
    # joined with its last one, which others may follow.
    xgrammar_mend(fsm.cc [[
  if (!ends_.empty()) {
    fsm.AddEpsilonEdge(start_, ends_.front());
  }
  return FSMWithStartEnd(fsm, start_, ends_);
]] [[
  const int new_start = fsm.AddState(), new_end = fsm.AddState();
  fsm.AddEpsilonEdge(new_start, start_);
  fsm.AddEpsilonEdge(new_start, new_end);
  for (auto end : ends_) fsm.AddEpsilonEdge(end, new_end);
  return FSMWithStartEnd(fsm, new_start, {new_end});
]])
    # In "(ab*|c){2,}" a "b" could follow a "c", because every end was joined with the first one.
    xgrammar_mend(fsm_builder.cc [[
    for (int i = 2; i < state.lower_bound; i++) {
      result = FSMWithStartEnd::Concat(std::vector<FSMWithStartEnd>{result, child});
    }
    int end_state_of_lower_bound_fsm = -1;
]] [[
    if (state.lower_bound == 0) return ResultOk(child.Star());
    for (int i = 2; i <= state.lower_bound; i++) {
      result = FSMWithStartEnd::Concat(std::vector<FSMWithStartEnd>{result, child});
    }
    return ResultOk(FSMWithStartEnd::Concat(std::vector<FSMWithStartEnd>{result, child.Star()}));
    int end_state_of_lower_bound_fsm = -1;
]])
    # What runs at every token is optimised in every build, the rest less. Sanitizers do not look into
    # foreign code, so that other builds can link that build's library.
    set(xgrammar_fast ${xgrammar_sources})
    list(FILTER xgrammar_fast INCLUDE REGEX "(grammar_matcher|earley_parser|grammar_compiler|compiled_grammar|fsm)\\.cc$")
    set(xgrammar_rest ${xgrammar_sources})
    list(REMOVE_ITEM xgrammar_rest ${xgrammar_fast})
    add_library(xgrammar_rest OBJECT ${xgrammar_rest})
    add_library(xgrammar STATIC ${xgrammar_fast} $<TARGET_OBJECTS:xgrammar_rest>)
    if(TWELL_SANITIZE)
      target_compile_options(xgrammar_rest PRIVATE -O0)
      target_compile_options(xgrammar PRIVATE -O1)
    else()
      target_compile_options(xgrammar_rest PRIVATE -O1)
      target_compile_options(xgrammar PRIVATE -O2)
    endif()
    # With CMAKE_UNITY_BUILD each half is one unit; two of its files share a name.
    set_source_files_properties(${xgrammar_root}/cpp/json_schema_converter.cc PROPERTIES
      SKIP_UNITY_BUILD_INCLUSION ON)
    foreach(part xgrammar xgrammar_rest)
      # As C++20 clang 14 refuses variants of types that are not complete yet.
      set_target_properties(${part} PROPERTIES EXPORT_COMPILE_COMMANDS OFF CXX_STANDARD 17)
      target_compile_options(${part} PRIVATE -w)
      # Its messages come to the room grammar/, which makes errors of them; nothing is printed.
      target_compile_definitions(${part} PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0
        XGRAMMAR_ENABLE_INTERNAL_CHECK=0 XGRAMMAR_LOG_CUSTOMIZE=1)
      target_include_directories(${part} SYSTEM PRIVATE ${xgrammar_root}/cpp ${xgrammar_includes})
    endforeach()
  endif()
  target_include_directories(xgrammar SYSTEM INTERFACE ${xgrammar_includes})
  target_link_libraries(xgrammar INTERFACE Threads::Threads)
  message(STATUS "TwELL: XGrammar's sources found")
else()
  message(STATUS "TwELL: no sources of XGrammar; grammars and JSON schemas are refused")
endif()
