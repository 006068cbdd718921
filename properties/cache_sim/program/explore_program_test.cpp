// `lockstep explore` and `lockstep replay` with a child process: what is found about a child can be
// replayed, messages are true, and nothing that was found is lost.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/trace/trace.hpp"
#include "properties/support/program.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/shell_words.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

/// The example child with one text in it replaced by another, under a name with a blank in it.
std::string damaged_example(const ScratchFolder& folder,
                            const std::vector<std::pair<std::string, std::string>>& replacements) {
  std::string child =
      read_text(std::string(LOCKSTEP_SOURCE_DIR) + "/fixtures/subjects/minimal_cache.py");
  for (const auto& [text, by] : replacements) {
    const std::size_t at = child.find(text);
    EXPECT_NE(at, std::string::npos) << "the example has no `" << text << "`";
    if (at != std::string::npos) child.replace(at, text.size(), by);
  }
  const std::string file = folder.write("my child.py", child);
  return "exec:python3 " + shell_quoted(file) + " --name 'it'\\''s mine'";
}

std::string damaged_example(const ScratchFolder& folder, const std::string& text,
                            const std::string& by) {
  return damaged_example(folder, {{text, by}});
}

/// Searches among the child and the oracle of `radix`.
std::vector<std::string> search_of(const std::string& child, const std::string& out,
                                   const std::vector<std::string>& more = {}) {
  std::vector<std::string> words = {"explore",      "--subject", child, "--subject",
                                    "oracle:radix", "--out",     out};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::string only_trace(const std::string& folder) {
  std::string found;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    EXPECT_EQ(found, "") << "one finding, one trace";
    found = entry.path().string();
  }
  return found;
}

// --- A server of one's own -----------------------------------------------------------------------

// One token too many is computed: the search finds it beside the oracle, shrinks it, and the trace
// that it writes shows it again, to `replay` and to the next search.
TEST(ExploreAChild, findsAnOffByOneAndWritesATraceThatReplays) {
  const ScratchFolder folder;
  const std::string child = damaged_example(folder, "tokens[:-1]", "tokens[:-2]");
  const std::string out = folder.path("findings");
  const ProgramRun search = run_program(search_of(child, out));
  EXPECT_EQ(search.status, kExitDiffers) << search.out << search.err;
  const std::string file = only_trace(out);
  const Result<cache_sim::Trace> trace = cache_sim::read_trace(file);
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  EXPECT_LE(trace->statements.size(), 6u) << read_text(file);

  const ProgramRun again = run_program({"replay", file, "--run-lines", "--allow-exec"});
  EXPECT_EQ(again.status, kExitDiffers) << again.out << again.err;
  EXPECT_NE(again.out.find("missed-reuse"), std::string::npos) << again.out;

  // The command that was printed is one that a shell understands.
  for (const std::string& line : lines_of(search.out)) {
    if (!line.starts_with("replay   ")) continue;
    Result<std::vector<std::string>> words = split_words(line.substr(9));
    ASSERT_TRUE(words.has_value());
    EXPECT_EQ(words->front(), "./lockstep");
    words->erase(words->begin());
    EXPECT_EQ(run_program(*words).status, kExitDiffers) << line;
  }
}

// A trace can come from anybody, and its run line can name any program.
TEST(RunLines, startProgramsOnlyWhereThatIsAllowed) {
  const ScratchFolder folder;
  const std::string touched = folder.path("touched");
  for (const char* const name : {"findings", "traces"})
    std::filesystem::create_directory(folder.path(name));
  const std::string file = folder.write(
      "findings/x.trace", "# run: lockstep replay %s --subject 'exec:touch " + touched +
                              "'\n# finds: subject-died\nadmit id=r tokens=a8\n");
  const std::string findings = folder.path("findings");
  const ProgramRun search = run_program({"explore", "--traces", "1", "--out", findings});
  EXPECT_EQ(search.status, kExitPass) << search.out << search.err;
  EXPECT_NE(search.out.find("--allow-exec"), std::string::npos) << search.out;
  EXPECT_EQ(run_program({"replay", file, "--run-lines"}).status, kExitBadInput);
  folder.write("traces/x.trace", read_text(file));
  const ProgramRun report =
      run_program({"report", "--fixtures", folder.path(""), "--out", folder.path("page")});
  EXPECT_EQ(report.status, kExitBadInput) << report.out << report.err;
  EXPECT_NE(report.err.find("--allow-exec"), std::string::npos) << report.err;
  EXPECT_FALSE(std::filesystem::exists(touched));
  run_program({"replay", file, "--run-lines", "--allow-exec"});
  EXPECT_TRUE(std::filesystem::exists(touched));
}

// Without --subject a file is played as commands.md says; that it asks for something else is said.
TEST(RunLines, areMentionedWhereOthersWerePlayed) {
  const ScratchFolder folder;
  const std::string file = folder.write("bug.trace",
                                        "# run: lockstep replay %s --defect "
                                        "sglang-no-buffer:frees-donated-slot\n"
                                        "# finds: freed-slot-in-use\n"
                                        "request id=r tokens=a1000 output=b8\nrun\n");
  const ProgramRun plain = run_program({"replay", file});
  EXPECT_EQ(plain.status, kExitPass);
  EXPECT_NE(plain.out.find("--run-lines"), std::string::npos) << plain.out;
  const ProgramRun own = run_program({"replay", file, "--run-lines"});
  EXPECT_EQ(own.status, kExitInvariant) << own.out << own.err;
  const std::string writes =
      folder.write("writes.trace", "# run: lockstep replay %s --json " + folder.path("x.json") +
                                       "\nrequest id=r tokens=a1000 output=b8\nrun\n");
  EXPECT_EQ(run_program({"replay", writes, "--run-lines"}).out.find("note:"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(folder.path("x.json")));
  for (const auto& [option, value] : {std::pair{"--subject", "radix"},
                                      {"--check", "off"},
                                      {"--model", "qwen3-next-80b"},
                                      {"--timeout", "1s"}})
    EXPECT_EQ(run_program({"replay", file, "--run-lines", option, value}).status, kExitBadInput)
        << option;
}

TEST(RunLines, takeTheFidelityAndTheConfigOfTheCommand) {
  const ScratchFolder folder;
  const std::string file = folder.write("x.trace",
                                        "# run: lockstep replay %s --config kv_tokens=2048\n"
                                        "request id=r tokens=a1000 output=b8\nrun\n");
  const auto run = [&](const std::string& config) {
    return run_program(
        {"replay", file, "--run-lines", "--fidelity", "reference", "--config", config});
  };
  EXPECT_EQ(run("model=tiny-qwen3-next").status, kExitPass);
  EXPECT_EQ(run("kv_tokens=4096").status, kExitPass) << "it counts over that of the line";
  const ProgramRun unknown = run("model=none");
  EXPECT_EQ(unknown.status, kExitBadInput);
  EXPECT_NE(unknown.err.find("none"), std::string::npos) << unknown.err;
}

// One sentence with the place, whatever is wrong; a line that plays itself ended the program.
TEST(RunLines, thatCannotBePlayedAreNamed) {
  const ScratchFolder folder;
  std::filesystem::create_directory(folder.path("traces"));
  for (const auto& [words, said] : std::vector<std::pair<std::string, std::string>>{
           {"--run-lines", "a # run: line that says --run-lines would never end"},
           {"--help", "--help shows a text and does nothing else"},
           {"--chek all", "lockstep replay has no option `--chek`, but `--check` is one"},
           {"--check some", "lockstep replay: --check: `some` is none of off, labels, all"},
           {"--config kv=1", "--config: config has no field `kv`"},
           {"--defect none", "there is no defect `none`; `lockstep list defects` shows all"}}) {
    const std::string file = folder.write(
        "traces/x.trace", "# run: lockstep replay %s " + words + "\nadmit id=r tokens=a8\n");
    for (const ProgramRun& run :
         {run_program({"replay", file, "--run-lines"}),
          run_program({"report", "--fixtures", folder.path(""), "--out", folder.path("page")})}) {
      EXPECT_EQ(run.status, kExitBadInput) << run.out;
      EXPECT_NE(run.err.find("x.trace:1: " + said), std::string::npos) << run.err;
    }
  }
}

TEST(RunLines, thatCannotBeSplitAreRefused) {
  const ScratchFolder folder;
  const std::string file =
      folder.write("x.trace", "# run: lockstep replay %s --subject 'radix\nadmit id=r tokens=a8\n");
  const ProgramRun run = run_program({"replay", file});
  EXPECT_EQ(run.status, kExitBadInput);
  EXPECT_NE(run.err.find(":1: # run: a quotation"), std::string::npos) << run.err;
}

const std::string kRequestLevel = "exec:python3 fixtures/subjects/minimal_cache.py";

// Tree verbs are not for a child that understands requests alone; that is the caller's mistake.
TEST(TreeVerbs, areBadUsageForAChildWithoutThem) {
  const ScratchFolder folder;
  const std::string file = folder.write("tree.trace", "config policy=radix\nmatch tokens=a4\n");
  for (const std::vector<std::string>& subjects : {std::vector<std::string>{kRequestLevel},
                                                   {kRequestLevel, "oracle:radix"},
                                                   {"radix", kRequestLevel}}) {
    std::vector<std::string> words = {"replay", file};
    for (const std::string& subject : subjects) {
      words.push_back("--subject");
      words.push_back(subject);
    }
    const ProgramRun run = run_program(words);
    EXPECT_EQ(run.status, kExitBadInput) << run.out;
    EXPECT_NE(run.err.find(":2: match"), std::string::npos) << run.err;
  }
}

// A plain `oracle` beside a child is that of the file's policy.
TEST(PlainOracle, besideAChildIsThatOfTheConfig) {
  const ScratchFolder folder;
  const std::string file =
      folder.write("x.trace", "config policy=radix\nadmit id=r tokens=a4\nabort id=r\n");
  const ProgramRun run =
      run_program({"replay", file, "--subject", kRequestLevel, "--subject", "oracle"});
  EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
  EXPECT_NE(run.out.find("beside oracle:radix:"), std::string::npos) << run.out;
}

// Fields and verbs that one of the subjects does not know are not drawn, whichever stands first.
// The example says itself that nothing fills its memory.
TEST(ExploreAChild, drawsWhatAllSubjectsAccept) {
  for (const std::string first : {"radix", "oracle:radix"}) {
    const ScratchFolder folder;
    const ProgramRun run = run_program({"explore", "--subject", first, "--subject", kRequestLevel,
                                        "--traces", "40", "--out", folder.path("f")});
    EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
  }
}

// Trees of drafts, ends inside an accepted run and transfers are drawn for a child that says it
// takes them.
TEST(ExploreAChild, drawsOperationsOfTheChildsCapabilities) {
  using Replacements = std::vector<std::pair<std::string, std::string>>;
  const auto status = [](const Replacements& replacements) {
    const ScratchFolder folder;
    const ProgramRun run = run_program({"explore", "--subject", "oracle:radix", "--subject",
                                        damaged_example(folder, replacements), "--traces", "60",
                                        "--seed", "10", "--out", folder.path("f"), "--no-shrink"});
    EXPECT_TRUE(run.status == kExitPass || run.status == kExitDiffers) << run.out << run.err;
    return run.status;
  };
  const auto takes = std::pair("again=1", "again=1 takes=server");
  const auto transfers = std::pair(
      "cached_prefix(caches[salt], tokens[:-1])",
      "max(cached_prefix(caches[salt], tokens[:-1]), min(int(other_fields.get('external', 0)), "
      "len(tokens) - 1))");
  // Tokens that another server has sent are not in this server's cache.
  const auto own = std::pair("shared=cached)", "shared=cached_prefix(caches[salt], tokens[:-1]))");
  const auto discards_nothing =
      std::pair("int(up_to or request.computed)",
                "int(up_to if verb == 'checkpoint' and up_to else request.computed)");
  EXPECT_EQ(status({discards_nothing}), kExitPass);
  EXPECT_EQ(status({takes, transfers, own}), kExitPass);
  EXPECT_EQ(status({takes}), kExitDiffers);
  EXPECT_EQ(status({takes, transfers, own, discards_nothing}), kExitDiffers);
}

// Labels that a child has not announced are compared with nothing. Who sends them hears that, once
// for all traces, and the verdict stays what it is.
TEST(ExploreAChild, isToldThatItsLabelsAreNotCompared) {
  const auto times_told = [](const std::string& out) {
    const std::string sentence =
        " answers admit with state= or conv=, and neither is compared: its answer to hello has no "
        "labels=1\n";
    std::size_t times = 0;
    for (std::size_t at = 0; (at = out.find(sentence, at)) != std::string::npos; ++at) ++times;
    return times;
  };
  const ScratchFolder folder;
  const std::string trace = "admit id=r tokens=a5\nextend id=r n=5\nfinish id=r\n";
  const std::string first = folder.write("first.trace", trace + trace);
  const std::string second = folder.write("second.trace", trace);
  const std::string answer = "cached={cached} evicted_kv=0 evicted_states=0";
  const std::string child =
      damaged_example(folder, answer, "cached={cached} state={cached} conv={cached}");
  const ProgramRun replayed = run_program({"replay", first, second, "--subject", child});
  EXPECT_EQ(replayed.status, kExitPass) << replayed.out << replayed.err;
  EXPECT_EQ(times_told(replayed.out), 1u) << replayed.out;
  EXPECT_EQ(run_program({"replay", first, "--subject", child, "--quiet"}).out, "");
  const ProgramRun searched = run_program(search_of(child, folder.path("f"), {"--traces", "40"}));
  EXPECT_EQ(searched.status, kExitPass) << searched.out << searched.err;
  EXPECT_EQ(times_told(searched.out), 1u) << searched.out;

  std::string source = read_text(folder.path("my child.py"));
  source.insert(source.find(" again=1"), " labels=1");
  folder.write("my child.py", source);
  EXPECT_EQ(times_told(run_program({"replay", first, "--subject", child}).out), 0u) << "announced";
  EXPECT_EQ(times_told(run_program({"replay", first, "--subject", kRequestLevel}).out), 0u);
}

// --- What a reader of a shrunk trace sees --------------------------------------------------------

/// The shrunk trace's operations, of a child that says `violation=…` where `rule` holds at a
/// finish; `request.said` are the verbs that it has heard.
std::string shrunk(const std::string& rule, const std::string& trace,
                   const std::vector<std::string>& more = {}) {
  const ScratchFolder folder;
  const std::string child = damaged_example(
      folder, {{"if verb in (\"finish\", \"abort\", \"preempt\"):\n        del",
                "if verb not in (\"hello\", \"admit\", \"flush\"):\n"
                "        request.said = getattr(request, \"said\", []) + [verb]\n"
                "    if verb == \"finish\" and (" +
                    rule +
                    "):\n        return \"exist=0 length=0 violation=found\"\n"
                    "    if verb in (\"finish\", \"abort\", \"preempt\"):\n        del"},
               {"        request.computed += int(n)\n        return",
                "        request.computed += int(n)\n        request.said = getattr(request, "
                "\"said\", []) + [verb]\n        return"}});
  const std::string file = folder.write("in.trace", trace);
  std::vector<std::string> words = {"shrink",    file, "-o", folder.path("out.trace"),
                                    "--subject", child};
  words.insert(words.end(), more.begin(), more.end());
  const ProgramRun run = run_program(words);
  EXPECT_EQ(run.status, kExitInvariant) << run.out << run.err;
  std::string text;
  for (const std::string& line : lines_of(read_text(folder.path("out.trace"))))
    if (!line.starts_with('#')) text += line + '\n';
  return text;
}

// Tokens are named by where sequences part, whatever their names were.
TEST(ShrinkAChild, namesEachBranchOnce) {
  EXPECT_EQ(shrunk("len(request.tokens) == 11 and request.computed == 8",
                   "admit id=x tokens=a1+a3+a1:4+a3:6+a4:5\nextend id=x n=8\nfinish id=x\n"),
            "admit id=r1 tokens=a11\nextend id=r1 n=8\nfinish id=r1\n");
  EXPECT_EQ(shrunk("request.tokens[:4] == request.tokens[4:8]",
                   "admit id=x tokens=c3:7+c3:7\nfinish id=x\n"),
            "admit id=r1 tokens=a4+a4\nfinish id=r1\n")
      << "it depends on the tokens";
  EXPECT_EQ(shrunk("any(r.tokens[:4] == request.tokens[:4] and r.tokens[4:5] != "
                   "request.tokens[4:5] for r in running.values() if min(len(r.tokens), "
                   "len(request.tokens)) > 4)",
                   "admit id=x tokens=c4+a1+c1+c3\nadmit id=y tokens=c4+b1:5\nfinish id=x\n"),
            "admit id=r1 tokens=a5\nadmit id=r2 tokens=a4+b1\nfinish id=r1\n");
}

// Two decode steps are one extend of both tokens.
TEST(ShrinkAChild, joinsExtends) {
  EXPECT_EQ(shrunk("len(request.tokens) > 2 and request.computed == len(request.tokens)",
                   "admit id=x tokens=a1\nextend id=x n=1\nextend id=x n=1 tokens=b1\n"
                   "extend id=x n=1 tokens=b1:2\nfinish id=x\n"),
            "admit id=r1 tokens=a1\nextend id=r1 n=3 tokens=a1:3\nfinish id=r1\n");
}

// The result of a verification stays with the forward that verifies, also beside a policy to which
// an accept without drafts is one sampled token.
TEST(ShrinkAChild, keepsTheVerificationOfAnAccept) {
  const std::string trace =
      "admit id=x tokens=a4\nextend id=x n=4\nextend drafts=b1:2 id=x n=2 tokens=b1\n"
      "accept id=x n=1 tokens=c1\nfinish id=x\n";
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{}, {"--subject", "oracle:radix"}}) {
    const std::string text = shrunk("'accept' in request.said", trace, more);
    EXPECT_NE(text.find("drafts="), std::string::npos) << text;
  }
}

// --- What is left behind -------------------------------------------------------------------------

// A server that has called setsid, and outlives the process that was asked, ends with the program.
TEST(Replay, endsServersThatLeftTheirSession) {
  const ScratchFolder folder;
  const std::string child = folder.write("child.py", R"(
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True: os.read(os.open("/dev/zero", os.O_RDONLY), 1), os.sched_yield()
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): os.sched_yield()
for line in sys.stdin:
    print("levels=request" if line.startswith("hello") else "cached=0", flush=True)
)");
  const std::string trace = folder.write("x.trace", "admit id=r tokens=a4\n");
  const std::string number = folder.path("pid");
  const ProgramRun run =
      run_program({"replay", trace, "--subject", "exec:python3 " + child + " " + number});
  EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
  const pid_t server = std::stoi(read_text(number));
  EXPECT_EQ(::kill(server, 0), -1) << "it runs on";
  ::kill(server, SIGKILL);
}

// --- What is not lost ----------------------------------------------------------------------------

// A child that fails at hello is found before any operation: the trace replays all the same, and
// the next search in that folder goes on.
TEST(Explore, writesATraceThatReplaysWhereTheChildFailsAtHello) {
  const ScratchFolder folder;
  const std::string child = folder.write(
      "child.py", "for _ in iter(input, ''): print('levels=request raised=no memory', flush=True)");
  const std::string out = folder.path("findings");
  const std::vector<std::string> search = {
      "explore", "--subject", "exec:python3 " + child, "--traces", "3", "--out", out};
  EXPECT_EQ(run_program(search).status, kExitDiffers);
  const std::string file = only_trace(out);
  const ProgramRun replayed = run_program({"replay", file, "--run-lines", "--allow-exec"});
  EXPECT_EQ(replayed.status, kExitDiffers) << replayed.err;
  EXPECT_NE(replayed.out.find("subject-died"), std::string::npos) << replayed.out;
  std::vector<std::string> again = search;
  again.push_back("--allow-exec");
  const ProgramRun found = run_program(again);
  EXPECT_EQ(found.status, kExitDiffers) << found.err;
  EXPECT_NE(found.out.find(file + ": is still there"), std::string::npos) << found.out;
}

// Findings of an earlier search are played first; a file that cannot be played stops no search.
TEST(Explore, namesTracesThatItCannotPlayAndGoesOn) {
  const ScratchFolder folder;
  const std::string file = folder.write("old.trace", "# run: lockstep replay %s\nno_such_verb\n");
  const ProgramRun run =
      run_program({"explore", "--subject", "radix", "--traces", "1", "--out", folder.path("")});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  EXPECT_NE(run.out.find("not replayed: " + file + ":2: "), std::string::npos) << run.out;
}

// A server of which every second process answers otherwise: what it did wrong cannot be shown
// again, and that is what is wrong with it.
TEST(Explore, addsToItsCorpusAndBeginsWithIt) {
  const ScratchFolder folder;
  const auto search = [&](const char* traces, const char* seed) {
    return run_program({"explore", "--subject", "radix", "--subject", "oracle:radix", "--traces",
                        traces, "--seed", seed, "--corpus", folder.path("corpus"), "--out",
                        folder.path("f")});
  };
  const auto names = [&] {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path("corpus")))
      found.push_back(entry.path().filename().string());
    std::ranges::sort(found);
    return found;
  };
  ASSERT_EQ(search("200", "1").status, kExitPass);
  const std::vector<std::string> added = names();
  ASSERT_FALSE(added.empty());
  const std::string text = read_text(folder.path("corpus/" + added.front()));
  EXPECT_TRUE(text.starts_with(
      "# run: lockstep replay %s --subject radix --subject oracle:radix\n# Reaches "))
      << text;
  EXPECT_EQ(run_program({"replay", folder.path("corpus/" + added.front()), "--run-lines"}).status,
            kExitPass);

  folder.write("corpus/other.trace", "check\n");
  const ProgramRun again = search("1", "2");
  EXPECT_EQ(again.status, kExitPass) << again.err;
  EXPECT_NE((again.out + again.err).find("other.trace has no line `# run: lockstep replay %s`"),
            std::string::npos)
      << again.out << again.err;
  std::filesystem::remove(folder.path("corpus/other.trace"));
  // A trace that cannot be played is counted; one with a field without effect is played.
  const std::string line = "# run: lockstep replay %s --subject radix --subject oracle:radix\n";
  folder.write("corpus/idle.trace", line + "config policy=radix routing=prefix\ncheck\n");
  EXPECT_EQ(search("1", "2").out.find("not in the corpus"), std::string::npos);
  folder.write("corpus/bad.trace", line + "config policy=radix kv_tokens=2 page=4\ncheck\n");
  folder.write("corpus/others.trace", "# run: lockstep replay %s --subject marconi\ncheck\n");
  const ProgramRun counted = search("1", "2");
  EXPECT_NE(counted.out.find("not in the corpus: 2 traces that cannot be played, the first " +
                             folder.path("corpus/bad.trace") +
                             ": field kv_tokens: 2 is less than one page of 4"),
            std::string::npos)
      << counted.out << counted.err;
  for (const char* const file : {"idle", "bad", "others"})
    std::filesystem::remove(folder.path(std::string("corpus/") + file + ".trace"));
  const std::vector<std::string> later = names();
  EXPECT_TRUE(std::ranges::includes(later, added));
}

TEST(Explore, callsAFindingThatDoesNotRepeatNondeterministic) {
  const ScratchFolder folder;
  const std::string child = folder.write("child.py", R"(
import os, sys
count = 0
path = sys.argv[1]
try:
    count = len(open(path).read())
except OSError:
    pass
open(path, "a").write("x")
for line in sys.stdin:
    verb, *fields = line.split()
    field = dict(f.split("=", 1) for f in fields)
    answer = "ok"
    if verb == "hello": answer = "levels=request"
    if verb == "admit": answer = "cached=0" if count % 4 else "cached=999999"
    if verb == "extend": answer = "n=" + field["n"]
    print(answer, flush=True)
)");
  const std::string out = folder.path("findings");
  const ProgramRun run =
      run_program({"explore", "--subject", "exec:python3 " + child + " " + folder.path("count"),
                   "--traces", "20", "--out", out});
  EXPECT_EQ(run.status, kExitNondeterministic) << run.out << run.err;
  EXPECT_NE(read_text(only_trace(out)).find("# finds: nondeterministic\n"), std::string::npos);
}

TEST(Explore, noticesAtItsStartThatNothingCanBeWritten) {
  const ScratchFolder folder;
  const std::string file = folder.write("file", "");
  const ProgramRun run =
      run_program({"explore", "--traces", "1000000", "--out", file + "/findings"});
  EXPECT_EQ(run.status, kExitEnvironment) << run.out;
  EXPECT_NE(run.err.find(file + "/findings"), std::string::npos) << run.err;
  const ProgramRun json = run_program({"explore", "--traces", "1000000", "--out",
                                       folder.path("out"), "--json", file + "/search.json"});
  EXPECT_EQ(json.status, kExitEnvironment) << json.out;
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"file"});
}

// INT ends the search, not what it has found.
TEST(Explore, keepsWhatItHasFoundWhenItIsInterrupted) {
  const ScratchFolder folder;
  const std::string out = folder.path("findings");
  const std::string json = folder.path("search.json");
  int said[2];
  ASSERT_EQ(::pipe(said), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(said[1], STDOUT_FILENO);
    ::close(said[0]);
    ::close(said[1]);
    ::execl(LOCKSTEP_PROGRAM, "lockstep", "explore", "--defect",
            "sglang-no-buffer:frees-donated-slot", "--findings", "1000000", "--traces",
            "1000000000", "--no-shrink", "--out", out.c_str(), "--json", json.c_str(),
            static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(said[1]);
  // It is interrupted as soon as it says that a finding is written, and read to its end.
  std::FILE* const stream = ::fdopen(said[0], "r");
  std::string written;
  for (char line[4096]; std::fgets(line, sizeof line, stream) != nullptr;)
    if (std::string_view(line).starts_with("written  ") && written.empty()) {
      written = std::string(line).substr(9);
      written.pop_back();
      ::kill(child, SIGINT);
    }
  std::fclose(stream);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kExitInvariant);
  EXPECT_TRUE(std::filesystem::exists(written)) << "a finding is written when it is made";
  EXPECT_NE(read_text(json).find("\"findings\""), std::string::npos);
}

// INT is noted from the beginning: it ends the replay of earlier findings too, and the program says
// how far it came. The first finding's own child sends it.
TEST(Explore, isInterruptedWhileEarlierFindingsAreReplayed) {
  const ScratchFolder folder;
  const std::string child = folder.write("child.py", R"(
import os, signal, sys
open(sys.argv[1], "w")
os.kill(os.getppid(), signal.SIGINT)
for _ in sys.stdin: print("levels=request raised=no memory", flush=True)
)");
  std::filesystem::create_directory(folder.path("findings"));
  for (const std::string name : {"a", "b"})
    folder.write("findings/" + name + ".trace",
                 "# run: lockstep replay %s --subject 'exec:exec python3 " + child + " " +
                     folder.path("started-" + name) + "'\n# finds: subject-died\ncheck\n");
  const ProgramRun run = run_program(
      {"explore", "--subject", "radix", "--allow-exec", "--out", folder.path("findings")});
  EXPECT_EQ(run.status, 130) << run.out << run.err;
  EXPECT_NE(run.out.find("interrupted"), std::string::npos) << run.out;
  EXPECT_TRUE(std::filesystem::exists(folder.path("started-a")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("started-b")));
}

TEST(Explore, checksAsTheCheckLevelSays) {
  const ScratchFolder folder;
  const std::vector<std::string> words = {"explore",
                                          "--subject",
                                          "sglang-no-buffer",
                                          "--defect",
                                          "sglang-no-buffer:frees-donated-slot",
                                          "--traces",
                                          "20",
                                          "--out",
                                          folder.path("f")};
  std::vector<std::string> unchecked = words;
  unchecked.insert(unchecked.end(), {"--check", "off"});
  EXPECT_EQ(run_program(unchecked).status, kExitPass);
  EXPECT_EQ(run_program(words).status, kExitInvariant);
}

}  // namespace
}  // namespace lockstep
