// The kernels of fixtures/candidates/ as words of `lockstep judge`, and what Python ones need.
#pragma once

#include <cstdlib>
#include <string>

namespace lockstep::testing_support {

/// A function of the library of candidates that the build makes.
inline std::string library(const std::string& symbol) {
  return std::string(LOCKSTEP_CANDIDATES) + ":" + symbol;
}

/// Whether the Python that candidates run in has PyTorch; `python` becomes its name.
inline bool has_pytorch(std::string& python) {
  const char* const given = std::getenv("LOCKSTEP_PYTHON");
  python = given == nullptr ? "python3" : given;
  // NOLINTNEXTLINE(cert-env33-c): the user's own Python, by the word that the user gave
  return std::system((python + " -c 'import torch' >/dev/null 2>&1").c_str()) == 0;
}

}  // namespace lockstep::testing_support
