# SPDX-License-Identifier: Apache-2.0
# cuDNN's headers and its header-only frontend (fetched by scripts/setup.sh). cuDNN itself is loaded
# at first use; without the headers, attention uses only our own kernels.
add_library(twell_cudnn INTERFACE)
add_library(twell::cudnn ALIAS twell_cudnn)
if(TWELL_HAVE_CUDA)
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h
    HINTS ${PROJECT_SOURCE_DIR}/.cache/cudnn-frontend/include)
  find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(CUDNN_FRONTEND_INCLUDE_DIR AND CUDNN_INCLUDE_DIR)
    target_include_directories(twell_cudnn SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR}
      ${CUDNN_INCLUDE_DIR})
    target_compile_definitions(twell_cudnn INTERFACE TWELL_HAVE_CUDNN)
    target_link_libraries(twell_cudnn INTERFACE ${CMAKE_DL_LIBS})
    message(STATUS "TwELL: cuDNN headers found")
  else()
    message(STATUS "TwELL: no cuDNN headers; attention runs our own kernels alone")
  endif()
endif()
