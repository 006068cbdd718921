// Words of a command line by the rules of a shell: printed commands can be pasted into a shell, and
// `# run:` lines of traces are split by the same rules.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep {

/// The word, quoted if necessary so that a shell reads it as one word (sh; for control characters
/// bash or zsh). `%s` becomes `%''s`, because `%s` in a `# run:` line stands for the trace's file.
std::string shell_quoted(std::string_view word);

/// The words of a line, separated by blanks. '...' quotes everything; "..." everything but \ before
/// one of \ " $ `; $'...' knows the escapes \n \t \r \\ \' and \xHH; outside of quotes \ quotes the
/// next character. Nothing is expanded, but each literal `%s` is replaced by `file`. Error: a quote
/// that is not closed.
Result<std::vector<std::string>> split_words(std::string_view line, std::string_view file = "%s");

}  // namespace lockstep
