// Files of users, opened for reading: what is no file, or no text, is named before anything is
// read.
#pragma once

#include <fstream>
#include <string>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

/// Opens a regular file (links are followed) at its first byte. Errors name the path and what
/// stands there: nothing, a folder, a pipe or a device, gzip, a byte order mark.
Result<std::ifstream> open_input(const std::string& path);

}  // namespace lockstep::cache_sim
