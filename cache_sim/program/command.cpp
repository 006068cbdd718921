#include "cache_sim/program/command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "cache_sim/program/output.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::program {
namespace {

const CLI::App* subcommand_of(const CLI::App& app, const std::string& name) {
  for (const CLI::App* const command : app.get_subcommands({}))
    if (command->get_name() == name) return command;
  return nullptr;
}

/// `text` up to `word`, and what stands after it. False where it does not stand there.
bool cut_at(const std::string& text, const std::string& word, std::string& before,
            std::string& after) {
  const std::size_t at = text.find(word);
  if (at == std::string::npos) return false;
  before = text.substr(0, at);
  after = text.substr(at + word.size());
  return true;
}

/// Three sentences of CLI11 (2.1) in this program's words; the others as they are.
std::string in_our_words(const std::string& what) {
  std::string before, after;
  if (cut_at(what, " not in {", before, after)) {  // --check: label not in {off,labels,all}
    std::string name, value, list;
    if (!cut_at(before, ": ", name, value)) return what;
    for (const char c : after.substr(0, after.find('}'))) list += c == ',' ? ", " : std::string{c};
    return name + ": `" + value + "` is none of " + list;
  }
  if (cut_at(what, "Could not convert: ", before, after)) {  // Could not convert: --seed = x
    std::string name, value;
    if (cut_at(after, " = ", name, value)) return name + ": `" + value + "` is not a whole number";
  }
  if (cut_at(what, ": 1 required ", before, after)) return before + " needs a value";
  return what;
}

/// The mistake in the words of this command.
std::string usage_sentence(const CLI::App& command, const std::string& name,
                           const CLI::ParseError& error) {
  if (const std::vector<std::string> extras = command.remaining();
      dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !extras.empty()) {
    const auto option =
        std::ranges::find_if(extras, [](const std::string& word) { return word.starts_with("-"); });
    if (option == extras.end()) return name + " takes no further word `" + extras.front() + "`";
    std::vector<std::string> known;
    for (const CLI::Option* const one : command.get_options())
      for (const std::string& long_name : one->get_lnames()) known.push_back("--" + long_name);
    const std::string typed = option->substr(0, option->find('='));
    return name + " has no option `" + *option + "`" +
           but_near(typed, {known.begin(), known.end()});
  }
  std::string what = error.what();
  what.resize(std::min(what.find('\n'), what.size()));
  return name + ": " + in_our_words(what);
}

/// One sentence about words that cannot be understood.
std::string usage_sentence(const CLI::App& app, const CLI::ParseError& error,
                           const std::vector<std::string>& words) {
  const std::string all = "; `lockstep --help` shows all";
  if (words.empty()) return "no command is named" + all;
  const CLI::App* const command = subcommand_of(app, words.front());
  if (command == nullptr) {
    const bool is_option = words.front().starts_with("-");
    std::vector<std::string> known = {"nightly", "server", "sweep"};
    for (const CLI::App* const one : app.get_subcommands({})) known.push_back(one->get_name());
    return std::string("there is no ") + (is_option ? "option" : "command") + " `" + words.front() +
           "`" + but_near(words.front(), {known.begin(), known.end()}) + all;
  }
  const std::string name = "lockstep " + words.front();
  return usage_sentence(*command, name, error) + "; `" + name + " --help` shows its words";
}

template <class Number>
std::string number_refusal(const std::string& text, Number least, std::string_view what) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range && stop == end)
    return fmt::format("`{}` does not fit 64 bits", text);
  const bool is_right = error == std::errc() && stop == end && number >= least;
  return is_right ? "" : fmt::format("`{}` is not a {}", text, what);
}

}  // namespace

// --- An option -----------------------------------------------------------------------------------

Option* Option::required() {
  option_->required();
  return this;
}

Option* Option::capture_default_str() {
  option_->capture_default_str();
  return this;
}

Option* Option::repeatable() {
  option_->take_all()->allow_extra_args(false);
  return this;
}

Option* Option::excludes(const Option* other) {
  option_->excludes(other->option_);
  return this;
}

Option* Option::one_of(std::vector<std::string> values) {
  option_->check(CLI::IsMember(std::move(values)));
  return this;
}

Option* Option::positive() {
  const auto refusal = [](const std::string& text) {
    return number_refusal<std::int64_t>(text, 1, "positive number");
  };
  option_->check(CLI::Validator(refusal, ""));
  return this;
}

Option* Option::number_from(double least) {
  const auto refusal = [least](const std::string& text) {
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    const bool is_number = !text.empty() && *end == '\0' && std::isfinite(number);
    return is_number && number >= least
               ? ""
               : fmt::format("`{}` is not a number from {} on", text, least);
  };
  option_->check(CLI::Validator(refusal, ""));
  return this;
}

Option* Option::whole_number() {
  const auto refusal = [](const std::string& text) {
    return number_refusal<std::uint64_t>(text, 0, "whole number");
  };
  option_->check(CLI::Validator(refusal, ""));
  return this;
}

bool Option::is_given() const {
  return option_->count() > 0;
}

// --- A command -----------------------------------------------------------------------------------

Command::Command(std::string about, std::string name)
    : own_(std::make_unique<CLI::App>(std::move(about), std::move(name))), parser_(own_.get()) {}

Command::Command(CLI::App& parser) : parser_(&parser) {}

Command::~Command() = default;

Command* Command::add_subcommand(std::string name, std::string about) {
  CLI::App* const parser = parser_->add_subcommand(std::move(name), std::move(about));
  commands_.push_back(std::unique_ptr<Command>(new Command(*parser)));
  return commands_.back().get();
}

Option* Command::keep(CLI::Option* option) {
  options_.push_back(std::make_unique<Option>(option));
  return options_.back().get();
}

Option* Command::add_option(std::string name, std::string& value, std::string about) {
  return keep(parser_->add_option(std::move(name), value, std::move(about)));
}

Option* Command::add_output(std::string name, std::string& path, std::string about) {
  CLI::Option* const option = parser_->add_option(std::move(name), path, std::move(about));
  const auto refusal = [](const std::string& text) {
    return text == "-"    ? "`-` names no file, but /dev/stdout is one"
           : text.empty() ? "an empty text names no file"
                          : "";
  };
  return keep(option->check(CLI::Validator(refusal, "")));
}

Option* Command::add_option(std::string name, std::vector<std::string>& values, std::string about) {
  return keep(parser_->add_option(std::move(name), values, std::move(about)));
}

Option* Command::add_option(std::string name, std::int64_t& value, std::string about) {
  return keep(parser_->add_option(std::move(name), value, std::move(about)));
}

Option* Command::add_option(std::string name, std::uint64_t& value, std::string about) {
  return keep(parser_->add_option(std::move(name), value, std::move(about)));
}

Option* Command::add_option(std::string name, double& value, std::string about) {
  return keep(parser_->add_option(std::move(name), value, std::move(about)));
}

Option* Command::add_flag(std::string name, bool& value, std::string about) {
  return keep(parser_->add_flag(std::move(name), value, std::move(about)));
}

Option* Command::add_flag_callback(std::string name, std::function<void()> given,
                                   std::string about) {
  return keep(parser_->add_flag_callback(std::move(name), std::move(given), std::move(about)));
}

void Command::callback(std::function<void()> run) {
  parser_->callback(std::move(run));
}

void Command::add_version(const std::string& version) {
  parser_->set_version_flag("--version", version);
}

void Command::footer(std::string text) {
  parser_->footer(std::move(text));
}

Result<void> Command::parse(std::vector<std::string> words) {
  std::ranges::reverse(words);  // CLI11 takes words from the back
  try {
    parser_->parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return fail("--help shows a text and does nothing else");
    return fail(usage_sentence(*parser_, parser_->get_name(), error));
  }
  return {};
}

int Command::run(const std::vector<std::string>& words, const int& status) {
  parser_->require_subcommand(1);
  try {
    parser_->parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return parser_->exit(error);  // --help, --version
    return refuse({.text = usage_sentence(*parser_, error, words)});
  }
  return status;
}

// --- The end of its help -------------------------------------------------------------------------

std::vector<StatusHelp> statuses_of_runs() {
  return {
      {kExitPass, "nothing found"},
      {kExitBadInput, "bad usage or bad input; nothing is written"},
      {kExitEnvironment, "the environment: a child that cannot start, a full disk"},
      {kExitInvariant, "a broken invariant or label"},
      {kExitDiffers, "replies, answers or outputs differ"},
      {kExitLiveness, "something never ends"},
      {kExitNondeterministic, "two runs of the same trace differ"},
  };
}

void end_help(Command& command, const std::vector<StatusHelp>& statuses, const Example& example) {
  std::string text = "Exit status:\n";
  for (const StatusHelp& one : statuses)
    text += fmt::format("  {:<4} {}\n", one.status, one.meaning);
  text += example.status == kExitPass
              ? "\nExample:\n"
              : fmt::format("\nExample (it ends with {}):\n", example.status);
  command.footer(text + "  " + example.command);
}

}  // namespace lockstep::program
