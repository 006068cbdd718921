// Writing result files, and the date and commit that they carry.
#pragma once

#include <string>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

/// The day in UTC; that of SOURCE_DATE_EPOCH (reproducible-builds.org) where it is set.
std::string today();

/// The commit of the checkout that the program runs in, `unknown` outside the lockstep script.
std::string commit();

/// Writes beside the file, under a name that nobody else uses, and renames, so that nothing is
/// half-written and of several writers the last one wins. Symbolic links stay: the file that they
/// lead to is written. What is no regular file (a device, a pipe), and standard output and error by
/// whatever name, is written directly. The error names the path and the reason.
Result<void> write_file(const std::string& path, const std::string& content);

}  // namespace lockstep::cache_sim
