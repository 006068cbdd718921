// The words of a command: options, flags, their checks, and the end of its help. Files that add
// words see these two classes alone, because CLI11's header costs each file that includes it four
// seconds.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reference/base/result.hpp"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11 has named it
class App;
class Option;
}  // namespace CLI

namespace lockstep::program {

/// An option or a word of a command. Each setter gives the option back.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option* required();
  Option* capture_default_str();  ///< its help shows the value that it has now
  Option* repeatable();           ///< each time with one value
  Option* excludes(const Option* other);
  Option* one_of(std::vector<std::string> values);
  Option* positive();
  Option* number_from(double least);  ///< finite
  Option* whole_number();             ///< CLI11 would take -1 as a large number
  bool is_given() const;

 private:
  CLI::Option* option_;
};

/// One exit status, and what it means of this command.
struct StatusHelp {
  int status;
  std::string meaning;
};

/// The statuses of a command that plays traces.
std::vector<StatusHelp> statuses_of_runs();

/// A command, and the status that it ends with.
struct Example {
  std::string command;
  int status = 0;
};

/// A command, or the program with its commands. It owns what is added to it.
class Command {
 public:
  Command(std::string about, std::string name);
  Command(Command&&) = delete;
  ~Command();

  Command* add_subcommand(std::string name, std::string about);
  Option* add_option(std::string name, std::string& value, std::string about);
  Option* add_output(std::string name, std::string& path, std::string about);  ///< to write
  Option* add_option(std::string name, std::vector<std::string>& values, std::string about);
  Option* add_option(std::string name, std::int64_t& value, std::string about);
  Option* add_option(std::string name, std::uint64_t& value, std::string about);
  Option* add_option(std::string name, double& value, std::string about);
  Option* add_flag(std::string name, bool& value, std::string about);
  Option* add_flag_callback(std::string name, std::function<void()> given, std::string about);
  void callback(std::function<void()> run);
  void add_version(const std::string& version);
  void footer(std::string text);

  /// Reads the words and calls back. The sentence is the parser's own.
  Result<void> parse(std::vector<std::string> words);
  /// Likewise for the whole command line; refuses, or prints the help that is asked for. The exit
  /// status: `status` where a command was called back.
  int run(const std::vector<std::string>& words, const int& status);

  CLI::App& parser() const { return *parser_; }

 private:
  explicit Command(CLI::App& parser);
  Option* keep(CLI::Option* option);

  std::unique_ptr<CLI::App> own_;
  CLI::App* parser_;
  std::vector<std::unique_ptr<Option>> options_;
  std::vector<std::unique_ptr<Command>> commands_;
};

/// Ends the help of a command with the exit statuses that it can have, and an example that works in
/// the root of a checkout. A test runs each example and holds each status to the contract
/// (properties/cache_sim/program/help_check.py).
void end_help(Command& command, const std::vector<StatusHelp>& statuses, const Example& example);

}  // namespace lockstep::program
