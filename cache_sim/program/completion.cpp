// lockstep completion: shell completions, generated from the parser's own tree of commands, so that
// a new option is completed at once.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <array>

#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "reference/base/finding.hpp"

namespace lockstep::program {
namespace {

/// The source of the values of an option or positional.
struct Values {
  std::string list;                  ///< a word after `lockstep list`
  std::vector<std::string> choices;  ///< the only possible values
  bool is_file = false;
};

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> pieces(1);
  for (const char c : text) {
    if (c == at)
      pieces.emplace_back();
    else
      pieces.back() += c;
  }
  return pieces;
}

Values values_of(const CLI::Option& option) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kLists{{
      {"subject", "subjects"},
      {"policies", "policies"},
      {"defect", "defects"},
      {"model", "models"},
      {"OPERATION", "operations"},
      {"WORKLOAD", "workloads"},
  }};
  Values values;
  const std::string& name = option.get_single_name();
  for (const auto& [option_name, list] : kLists)
    if (name == option_name) values.list = list;
  const std::string type = option.get_type_name();  // such as TEXT:{off,labels,all}
  if (const std::size_t open = type.find('{'); open != std::string::npos)
    values.choices = split(type.substr(open + 1, type.find('}') - open - 1), ',');
  values.is_file = name == "WORKLOAD" || (values.list.empty() && values.choices.empty());
  return values;
}

/// The names of an option as they are typed: `-o` and `--out`.
std::vector<std::string> names_of(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  return names;
}

bool takes_value(const CLI::Option& option) {
  return option.get_items_expected_max() != 0;
}

std::string joined(const std::vector<std::string>& words) {
  return fmt::to_string(fmt::join(words, " "));
}

std::string replaced(std::string text, char what, const std::string& by) {
  for (std::size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + by.size()))
    text.replace(at, 1, by);
  return text;
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// --- bash ----------------------------------------------------------------------------------------

/// Escapes a text for single quotes of a shell.
std::string in_single_quotes(const std::string& text) {
  return replaced(text, '\'', "'\\''");
}

std::string bash_values(const Values& values) {
  if (!values.choices.empty()) return "words='" + joined(values.choices) + "'";
  if (!values.list.empty())
    return fmt::format("words=$(\"${{said[0]}}\" list {} 2>/dev/null | cut -d ' ' -f 1)",
                       values.list);
  return "return";  // file names, which bash completes by itself
}

std::string bash_script(const CLI::App& app) {
  std::string names, cases, options;
  for (const CLI::App* const command : commands_of(app)) {
    names += command->get_name() + " ";
    std::vector<std::string> words;
    for (const CLI::Option* const option : command->get_options()) {
      const std::vector<std::string> own = names_of(*option);
      words.insert(words.end(), own.begin(), own.end());
      if (takes_value(*option) && !option->get_positional())
        for (const std::string& name : own)
          cases += fmt::format("    {}:{}) {} ;;\n", command->get_name(), name,
                               bash_values(values_of(*option)));
    }
    options += fmt::format("    {}:-*) words='{}' ;;\n", command->get_name(), joined(words));
    for (const CLI::Option* const option : command->get_options())
      if (option->get_positional())
        options +=
            fmt::format("    {}:*) {} ;;\n", command->get_name(), bash_values(values_of(*option)));
  }
  return fmt::format(R"bash(# Lockstep's words for bash. Made by `lockstep completion bash`:
#   lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep
_lockstep() {{
  local line=${{COMP_LINE:0:COMP_POINT}} words= current last before
  local -a said
  read -ra said <<<"$line"
  [[ $line != *' ' ]] || said+=('')
  current=${{said[-1]}} last=${{said[-2]}}
  COMPREPLY=()
  if ((${{#said[@]}} == 2)); then
    words='{}--help --version'
  else
    case ${{said[1]}}:$last in
{}    *) case ${{said[1]}}:$current in
{}    esac ;;
    esac
  fi
  [[ $last != --policies || $current != *,* ]] || words=$(sed "s/^/${{current%,*}},/" <<<"$words")
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  # Bash takes what stands after a colon for a word of its own.
  before=${{current%"${{current##*:}}"}}
  [[ $COMP_WORDBREAKS != *:* ]] || COMPREPLY=("${{COMPREPLY[@]#"$before"}}")
}}
complete -o bashdefault -o default -F _lockstep lockstep ./lockstep
)bash",
                     names, cases, options);
}

// --- zsh -----------------------------------------------------------------------------------------

std::string zsh_text(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return in_single_quotes(escaped);
}

std::string zsh_action(const Values& values) {
  if (!values.choices.empty()) return "(" + joined(values.choices) + ")";
  if (!values.list.empty() && !values.is_file) return "{_lockstep_list " + values.list + "}";
  return "_files";
}

std::string zsh_script(const CLI::App& app) {
  std::string names, cases;
  for (const CLI::App* const command : commands_of(app)) {
    names +=
        fmt::format("    '{}:{}'\n", command->get_name(), zsh_text(command->get_description()));
    cases += fmt::format("    {})\n      _arguments \\\n", command->get_name());
    std::string positional;
    for (const CLI::Option* const option : command->get_options()) {
      const std::string about = zsh_text(option->get_description());
      const std::string action = takes_value(*option) ? ": :" + zsh_action(values_of(*option)) : "";
      if (option->get_positional())
        positional += fmt::format("        '*{}'\n", action);
      else
        for (const std::string& name : names_of(*option))
          cases += fmt::format("        '*{}[{}]{}' \\\n", name, about, action);
    }
    cases += (positional.empty() ? "        '*: :'\n" : positional) + "      ;;\n";
  }
  return fmt::format(R"zsh(#compdef lockstep
# Lockstep's words for zsh. Made by `lockstep completion zsh`, into a folder of $fpath as _lockstep.
_lockstep_list() {{
  local -a found
  found=(${{(f)"$(lockstep list $1 2>/dev/null | cut -d ' ' -f 1)"}})
  compadd -a found
}}
_lockstep() {{
  local -a commands
  commands=(
{}  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  local command=$words[2]
  shift words
  ((CURRENT--))
  case $command in
{}  esac
}}
if [ "$funcstack[1]" = _lockstep ]; then _lockstep "$@"; else compdef _lockstep lockstep; fi
)zsh",
                     names, cases);
}

// --- fish ----------------------------------------------------------------------------------------

std::string fish_text(const std::string& text) {
  return replaced(replaced(text, '\\', "\\\\"), '\'', "\\'");
}

std::string fish_values(const Values& values) {
  if (!values.choices.empty()) return fmt::format(" -x -a '{}'", joined(values.choices));
  if (!values.list.empty())
    return fmt::format(" -{} -a '(lockstep list {} 2>/dev/null | string split -f 1 \" \")'",
                       values.is_file ? "r" : "x", values.list);
  return " -r -F";
}

std::string fish_script(const CLI::App& app) {
  std::string text =
      "# Lockstep's words for fish. Made by `lockstep completion fish`:\n"
      "#   lockstep completion fish > ~/.config/fish/completions/lockstep.fish\n"
      "complete -c lockstep -n __fish_use_subcommand -f -l help -d 'Print this help'\n"
      "complete -c lockstep -n __fish_use_subcommand -f -l version -d 'Print the version'\n";
  for (const CLI::App* const command : commands_of(app)) {
    text += fmt::format("complete -c lockstep -n __fish_use_subcommand -f -a {} -d '{}'\n",
                        command->get_name(), fish_text(command->get_description()));
    const std::string seen = fmt::format("complete -c lockstep -n '__fish_seen_subcommand_from {}'",
                                         command->get_name());
    for (const CLI::Option* const option : command->get_options()) {
      std::string names;
      for (const std::string& name : option->get_lnames()) names += " -l " + name;
      for (const std::string& name : option->get_snames()) names += " -s " + name;
      text += seen + names;
      if (takes_value(*option)) text += fish_values(values_of(*option));
      if (!option->get_positional())
        text += fmt::format(" -d '{}'", fish_text(option->get_description()));
      text += "\n";
    }
  }
  return text;
}

}  // namespace

void add_completion(Command& app, int&) {
  Command* const command =
      app.add_subcommand("completion", "write a shell's completion of these commands");
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "the shell")->required()->one_of({"bash", "zsh", "fish"});
  end_help(*command,
           {{kExitPass, "written"},
            {kExitBadInput, "bad usage"},
            {kExitEnvironment, "the output cannot be written"}},
           {"lockstep completion bash > lockstep.bash"});
  command->callback([&app, shell] {
    print_text(*shell == "bash"  ? bash_script(app.parser())
               : *shell == "zsh" ? zsh_script(app.parser())
                                 : fish_script(app.parser()));
  });
}

}  // namespace lockstep::program
