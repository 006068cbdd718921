// Words of a command line as a shell reads them: printed commands can be pasted into one, and the
// `# run:` lines of traces are split by the same rules.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep {

/// The word as one word of a shell (sh; bash or zsh where it holds a control character), without
/// quotes where it needs none. `%s` does not stand in the result, because a `# run:` line means its
/// file by that: it becomes `%''s`.
std::string shell_quoted(std::string_view word);

/// The words of a line: separated by blanks; '…' quotes everything, "…" everything but \ before
/// one of \ " $ `, and $'…' the escapes \n \t \r \\ \' and \xHH; outside of quotes \ quotes the
/// next character. Nothing is expanded. A `%s` that stands in the line as it is becomes `file`.
/// Error: a quote that is not closed.
Result<std::vector<std::string>> split_words(std::string_view line, std::string_view file = "%s");

}  // namespace lockstep
