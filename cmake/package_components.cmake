# Read by cpack for each kind of package: Debian has fmt's library itself.

if(CPACK_GENERATOR STREQUAL DEB)
  list(REMOVE_ITEM CPACK_COMPONENTS_ALL libraries)
endif()
