// lockstep_static_kv_generate: greedy texts from a folder of packages, equal to those of `python -m
// lockstep.static_kv generate`.
#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <iostream>

#include "kernels/torch/static_kv/packages.hpp"

namespace lockstep::static_kv {
namespace {

/// Parses "1,2,3".
Result<Tokens> parse_tokens(const std::string& text) {
  Tokens tokens;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (;; ++at) {
    std::int32_t token = 0;
    const auto [next, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (next != end && *next != ','))
      return fail("--tokens: \"" + text + "\" is no list of tokens such as 1,2,3");
    tokens.push_back(token);
    at = next;
    if (at == end) return tokens;
  }
}

/// Parses prompts and pads them on the left to the longest.
Result<Prompts> parse_prompts(const std::vector<std::string>& texts) {
  std::vector<Tokens> rows;
  std::size_t longest = 0;
  for (const std::string& text : texts) {
    auto tokens = parse_tokens(text);
    if (!tokens) return tl::unexpected(tokens.error());
    longest = std::max(longest, tokens->size());
    rows.push_back(std::move(*tokens));
  }
  Prompts prompts;
  for (Tokens& row : rows) {
    std::vector<char> real(longest - row.size(), 0);
    row.insert(row.begin(), longest - row.size(), 0);
    real.resize(longest, 1);
    prompts.ids.push_back(std::move(row));
    prompts.real.push_back(std::move(real));
  }
  return prompts;
}

/// Shows progress on a terminal: the number of tokens of each row.
struct Shown : Runtime {
  using Runtime::Runtime;
  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override {
    if (::isatty(STDERR_FILENO) != 0) std::cerr << "\r" << ++tokens << " tokens " << std::flush;
    return Runtime::append(columns);
  }
  int tokens = 0;
};

Result<void> run(const std::string& folder, const std::vector<std::string>& texts,
                 std::int64_t new_tokens) {
  const c10::InferenceMode guard;
  const auto prompts = parse_prompts(texts);
  if (!prompts) return tl::unexpected(prompts.error());
  auto programs = load_packages(folder);
  if (!programs) return tl::unexpected(programs.error());
  const auto stop = stop_tokens(folder);
  if (!stop) return tl::unexpected(stop.error());
  Shown runtime(std::move(*programs));
  const auto found = generate(runtime, *prompts, {.new_tokens = new_tokens, .stop = *stop});
  if (runtime.tokens > 0) std::cerr << "\r\033[K";
  if (!found) return tl::unexpected(found.error());
  const auto prompt = static_cast<std::ptrdiff_t>(prompts->ids.front().size());
  for (const Tokens& row : *found)
    for (auto token = row.begin() + prompt; token != row.end(); ++token) {
      const bool ends =
          token + 1 == row.end() || std::find(stop->begin(), stop->end(), *token) != stop->end();
      std::cout << *token << (ends ? "\n" : ",");
      if (ends) break;
    }
  return {};
}

}  // namespace
}  // namespace lockstep::static_kv

int main(int argc, char** argv) try {
  CLI::App app("Greedy texts from a folder that `python -m lockstep.static_kv export` wrote.");
  std::string folder;
  std::vector<std::string> texts;
  std::int64_t new_tokens = 16;
  app.add_option("PACKAGE", folder, "the folder")->required();
  app.add_option("--tokens", texts, "a prompt, 1,2,3; once more for each further row")
      ->required()
      ->allow_extra_args(false);
  app.add_option("--new-tokens", new_tokens, "at most so many a row")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto done = lockstep::static_kv::run(folder, texts, new_tokens);
  if (!done) std::cerr << "lockstep_static_kv_generate: " << done.error().text << '\n';
  return done ? 0 : 2;
} catch (const std::exception& error) {  // LibTorch throws
  const std::string said = error.what();
  std::cerr << "lockstep_static_kv_generate: " << said.substr(0, said.find('\n')) << '\n';
  return 3;
}
