# The program, the headers as they lie in the source tree, the objects, and find_package(lockstep).

include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# Components: program; libraries, which a Debian package leaves to Debian; python; examples; development.
# fmt's library goes along, so that the installed folder also runs on a machine that has none of the packages.
file(RELATIVE_PATH library_folder /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
set_target_properties(lockstep PROPERTIES INSTALL_RPATH $ORIGIN/${library_folder})
install(TARGETS lockstep COMPONENT program)  # `pip install .` takes this component and libraries
if(TARGET lockstep-judge)
  set_target_properties(lockstep-judge PROPERTIES INSTALL_RPATH $ORIGIN/${library_folder})
  install(TARGETS lockstep-judge COMPONENT program OPTIONAL)  # where it was built
endif()
get_target_property(fmt_type fmt::fmt TYPE)
if(fmt_type STREQUAL SHARED_LIBRARY)
  install(IMPORTED_RUNTIME_ARTIFACTS fmt::fmt COMPONENT libraries)
endif()
if(NOT SKBUILD)  # a wheel has its own places
  install(FILES ${completion}/lockstep.bash RENAME lockstep
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT program)
  install(FILES ${completion}/lockstep.zsh RENAME _lockstep
          DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions COMPONENT program)
  install(FILES ${completion}/lockstep.fish
          DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT program)
  install(DIRECTORY cache_sim/python/lockstep DESTINATION lib/python3/dist-packages COMPONENT python
          PATTERN __pycache__ EXCLUDE)
  # Commands of README.md that name fixtures/… run in this folder.
  install(DIRECTORY fixtures DESTINATION ${CMAKE_INSTALL_DATADIR}/lockstep COMPONENT examples
          PATTERN __pycache__ EXCLUDE)
  install(FILES README.md CHANGELOG.md LICENSE reference/contract.md DESTINATION ${CMAKE_INSTALL_DOCDIR}
          COMPONENT examples)
endif()
# The style of pages, for those that Python writes.
install(FILES cache_sim/report/templates/style.css DESTINATION ${CMAKE_INSTALL_DATADIR}/lockstep COMPONENT program)

install(TARGETS ${installed_targets} EXPORT lockstepTargets
        OBJECTS DESTINATION ${CMAKE_INSTALL_LIBDIR}/lockstep COMPONENT development)
foreach(folder reference cache_sim kernels)
  if(IS_DIRECTORY ${PROJECT_SOURCE_DIR}/${folder})
    install(DIRECTORY ${folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep COMPONENT development
            FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*_abi.h" PATTERN "program" EXCLUDE)
  endif()
endforeach()
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${package_folder} COMPONENT development)
configure_package_config_file(cmake/lockstepConfig.cmake.in lockstepConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(lockstepConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
        DESTINATION ${package_folder} COMPONENT development)
