// Opens input files of users, and refuses a path that is no text file before anything is read.
#pragma once

#include <fstream>
#include <string>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

/// Opens a regular file (symbolic links are followed) at its first byte. The error names the path
/// and the reason: it does not exist, or is a folder, a pipe, a device, compressed with gzip, or
/// begins with a byte order mark.
Result<std::ifstream> open_input(const std::string& path);

}  // namespace lockstep::cache_sim
