# `cpack` in a build folder (the preset `package` has one of its own) makes
#
#   lockstep_VERSION_ARCH.deb      program, Python module, examples, completions; lockstep-dev with headers and objects
#   lockstep-VERSION-Linux.tar.gz  all of that and fmt's library, to be unpacked anywhere
#
# lockstep-judge is in them where the build had CCCL's headers (./lockstep judge brings them in).

set(CPACK_GENERATOR TGZ DEB)
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_VENDOR "The Lockstep authors")
set(CPACK_PACKAGE_CONTACT "The Lockstep authors <lockstep@localhost>")
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL program libraries python examples development)
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/package_components.cmake)

# Two Debian packages. What the program needs is read from the program itself (dpkg-shlibdeps of dpkg-dev).
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION devel)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME lockstep)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SUGGESTS "lockstep-dev, python3")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME lockstep-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "lockstep (= ${PROJECT_VERSION}), libexpected-dev, libfmt-dev, nlohmann-json3-dev, libeigen3-dev, libzstd-dev, libssl-dev")
include(CPack)
cpack_add_component_group(program)
cpack_add_component_group(development)
foreach(component program python examples)
  cpack_add_component(${component} GROUP program)
endforeach()
cpack_add_component(development GROUP development)
