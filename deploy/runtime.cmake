# What goes with the programs, and their Debian package.

# Manuals are what --help says.
find_program(CTKVR_HELP2MAN help2man DOC "Makes manuals of --help; without it there are none")
if(CTKVR_HELP2MAN AND NOT CTKVR_SANITIZE)
  # ctkvr_manual(target section name-line help-option)
  function(ctkvr_manual target section line help)
    set(page ${CMAKE_CURRENT_BINARY_DIR}/${target}.${section})
    add_custom_command(OUTPUT ${page} DEPENDS ${target} VERBATIM
      COMMAND ${CTKVR_HELP2MAN} --no-info --section=${section} --name=${line} --help-option=${help}
        --version-string=${PROJECT_VERSION} --source=ctkvr --output=${page} $<TARGET_FILE:${target}>)
    list(APPEND CTKVR_MANUALS ${page})
    set(CTKVR_MANUALS ${CTKVR_MANUALS} PARENT_SCOPE)
    install(FILES ${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section} COMPONENT runtime)
  endfunction()
  ctkvr_manual(ctkvrd 8 "KV cache retrieval service" --help)
  ctkvr_manual(ctkvr-cli 1 "look at a ctkvr server, replay attention through it, measure it" --help-all)
  add_custom_target(ctkvr_manuals ALL DEPENDS ${CTKVR_MANUALS})
endif()

install(FILES debian/ctkvrd.completion DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
  RENAME ctkvrd COMPONENT runtime)
install(FILES debian/ctkvrd.completion DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
  RENAME ctkvr-cli COMPONENT runtime)
# At their places whatever the prefix, so in the package alone.
install(FILES debian/ctkvrd.service DESTINATION /lib/systemd/system COMPONENT runtime EXCLUDE_FROM_ALL)
install(FILES debian/ctkvrd.toml DESTINATION /etc/ctkvr COMPONENT runtime EXCLUDE_FROM_ALL)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright COMPONENT runtime)
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
install(FILES prometheus/rules.yml DESTINATION ${CMAKE_INSTALL_DOCDIR}/prometheus COMPONENT runtime)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ctkvr)
set(CPACK_PACKAGE_VENDOR ctkvr)
set(CPACK_PACKAGE_CONTACT "The ctkvr authors")
set(CPACK_COMPONENTS_ALL runtime)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ctkvr)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "${PROJECT_DESCRIPTION}
 The server ctkvrd, its systemd unit, and the command line ctkvr-cli.")
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # what the programs link to, as dpkg knows it
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
  ${CMAKE_CURRENT_SOURCE_DIR}/debian/conffiles ${CMAKE_CURRENT_SOURCE_DIR}/debian/postinst
  ${CMAKE_CURRENT_SOURCE_DIR}/debian/prerm ${CMAKE_CURRENT_SOURCE_DIR}/debian/postrm)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
