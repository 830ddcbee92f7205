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
      target_include_directories(${part} SYSTEM PRIVATE ${xgrammar_includes})
    endforeach()
  endif()
  target_include_directories(xgrammar SYSTEM INTERFACE ${xgrammar_includes})
  target_link_libraries(xgrammar INTERFACE Threads::Threads)
  message(STATUS "TwELL: XGrammar's sources found")
else()
  message(STATUS "TwELL: no sources of XGrammar; grammars and JSON schemas are refused")
endif()
