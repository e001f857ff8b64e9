# What every target of ours gets: the repository root as include path, warnings as errors, the sanitizers asked for.

function(ctkvr_target name)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  # Off: missing-field-initializers, because designated initialisers leave members out on purpose; restrict, which
  # g++ 12 reports for "text" + std::string (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105651).
  target_compile_options(${name} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wimplicit-fallthrough
    -Wno-missing-field-initializers -Wno-restrict -Werror)
  if(CTKVR_SANITIZE)
    # Off: maybe-uninitialized, which g++ 12 reports for empty std::optional members in instrumented code.
    target_compile_options(${name} PRIVATE -fsanitize=${CTKVR_SANITIZE} -fno-sanitize-recover=all
      -fno-omit-frame-pointer -g1 -Wno-maybe-uninitialized)
    target_link_options(${name} PUBLIC -fsanitize=${CTKVR_SANITIZE})
  endif()
endfunction()
