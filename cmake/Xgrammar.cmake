# SPDX-License-Identifier: Apache-2.0
# XGrammar's C++ core (sources fetched by scripts/setup.sh) as a static library. Without the sources,
# the room grammar/ refuses every grammar with a reason.
set(xgrammar_root ${PROJECT_SOURCE_DIR}/.cache/xgrammar)
set(TWELL_XGRAMMAR_LIBRARY "" CACHE FILEPATH
  "libxgrammar.a of another build folder, which is linked instead of compiling XGrammar again")
set(xgrammar_includes ${xgrammar_root}/include ${xgrammar_root}/3rdparty/picojson
  ${xgrammar_root}/3rdparty/dlpack/include)
if(EXISTS ${xgrammar_root}/version)
  if(TWELL_XGRAMMAR_LIBRARY)
    add_library(xgrammar STATIC IMPORTED GLOBAL)
    set_target_properties(xgrammar PROPERTIES IMPORTED_LOCATION ${TWELL_XGRAMMAR_LIBRARY})
  else()
    file(GLOB_RECURSE xgrammar_sources CONFIGURE_DEPENDS ${xgrammar_root}/cpp/*.cc)
    add_library(xgrammar STATIC ${xgrammar_sources})
    # As C++20 clang 14 refuses variants of types that are not complete yet.
    set_target_properties(xgrammar PROPERTIES UNITY_BUILD OFF EXPORT_COMPILE_COMMANDS OFF
      CXX_STANDARD 17)
    # What runs at every token is optimised; the rest takes a third less compiler time without it.
    # Sanitizers do not look into foreign code, so that other builds can link that build's library;
    # there, tool formats and Lark grammars, which nothing of ours asks for, are not optimised at all.
    set(xgrammar_fast ${xgrammar_sources})
    list(FILTER xgrammar_fast INCLUDE REGEX "(grammar_matcher|earley_parser|grammar_compiler|compiled_grammar|fsm)\\.cc$")
    target_compile_options(xgrammar PRIVATE -w -O1)
    if(NOT TWELL_SANITIZE)
      set_source_files_properties(${xgrammar_fast} PROPERTIES COMPILE_OPTIONS -O2)
    else()
      set(xgrammar_unused ${xgrammar_sources})
      list(FILTER xgrammar_unused INCLUDE REGEX "(converter_ext/.*|structural_tag|lark_converter|testing|printer)\\.cc$")
      set_source_files_properties(${xgrammar_unused} PROPERTIES COMPILE_OPTIONS -O0)
    endif()
    # Its messages come to the room grammar/, which makes errors of them; nothing is printed.
    target_compile_definitions(xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0
      XGRAMMAR_ENABLE_INTERNAL_CHECK=0 XGRAMMAR_LOG_CUSTOMIZE=1)
    target_include_directories(xgrammar SYSTEM PRIVATE ${xgrammar_includes})
  endif()
  target_include_directories(xgrammar SYSTEM INTERFACE ${xgrammar_includes})
  target_link_libraries(xgrammar INTERFACE Threads::Threads)
  message(STATUS "TwELL: XGrammar's sources found")
else()
  message(STATUS "TwELL: no sources of XGrammar; grammars and JSON schemas are refused")
endif()
