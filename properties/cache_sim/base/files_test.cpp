// Users' files: results are written whole, through links, under names that do not collide; inputs
// are opened only where they are files; texts cannot send control sequences to a terminal.
#include "cache_sim/base/files.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>

#include "cache_sim/base/input.hpp"
#include "cache_sim/base/text.hpp"
#include "properties/support/program.hpp"
#include "reference/base/child_process.hpp"
#include "reference/base/leftovers.hpp"

namespace lockstep::cache_sim {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;
using Names = std::vector<std::string>;

// --- Writing -------------------------------------------------------------------------------------

// A signal that ends the program in the middle of a file leaves the old one, and no part of the
// new.
TEST(WrittenFiles, leaveNoPartWhereASignalEndsTheProgram) {
  for (int i = 0; i < 10; ++i) {
    const ScratchFolder folder;
    ChildProcess program;
    const auto body = [&] {
      clean_up_on_signals();
      const std::string content(std::size_t{1} << 24, 'x');
      if (!write_file(folder.path("report.json"), content)) return 1;
      if (::write(STDOUT_FILENO, "\n", 1) != 1) return 1;
      while (write_file(folder.path("report.json"), content)) continue;
      return 1;
    };
    ASSERT_EQ(program.start({.body = body}), 0);
    ASSERT_EQ(program.exchange("", std::chrono::seconds(60)), Exchange::answered);
    ::kill(program.id(), SIGTERM);
    ASSERT_TRUE(program.wait_for_exit(std::chrono::seconds(60)));
    EXPECT_EQ(folder.entries(), Names{"report.json"});
    EXPECT_EQ(fs::file_size(folder.path("report.json")), std::size_t{1} << 24);
  }
}

// A link is somebody's arrangement: `latest.json -> runs/7.json` stays one.
TEST(WrittenFiles, areThoseThatLinksLeadTo) {
  const ScratchFolder folder;
  fs::create_directory(folder.path("runs"));
  folder.write("runs/7.json", "old");
  fs::create_symlink("runs/7.json", folder.path("middle"));
  fs::create_symlink("middle", folder.path("latest"));
  fs::create_symlink("runs/8.json", folder.path("next"));
  for (const auto& [link, file] : {std::pair{"latest", "runs/7.json"}, {"next", "runs/8.json"}}) {
    ASSERT_TRUE(write_file(folder.path(link), "new"));
    EXPECT_TRUE(fs::is_symlink(folder.path(link)));
    EXPECT_EQ(read_text(folder.path(file)), "new");
    EXPECT_FALSE(fs::is_symlink(folder.path(file)));
  }
  fs::create_symlink("b", folder.path("a"));
  fs::create_symlink("a", folder.path("b"));
  EXPECT_FALSE(write_file(folder.path("a"), "x"));
}

// Replacing a pipe or a device (/dev/null!) by a file breaks what others do with it.
TEST(WrittenFiles, pipesAreWrittenAndStayPipes) {
  const ScratchFolder folder;
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDWR);
  ASSERT_TRUE(write_file(pipe, "content"));
  struct stat status {};
  ASSERT_EQ(::stat(pipe.c_str(), &status), 0);
  EXPECT_TRUE(S_ISFIFO(status.st_mode));
  char read[16] = {};
  EXPECT_EQ(::read(reader, read, sizeof read), 7);
  EXPECT_STREQ(read, "content");
  ::close(reader);
}

TEST(WrittenFiles, keepTheirPermissions) {
  const ScratchFolder folder;
  const std::string file = folder.write("private.json", "old");
  ASSERT_EQ(::chmod(file.c_str(), 0640), 0);
  ASSERT_TRUE(write_file(file, "new"));
  struct stat status {};
  ASSERT_EQ(::stat(file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
}

// Writers of one path do not meet in a temporary file: each succeeds, and one of them has the last
// word.
TEST(WrittenFiles, areWholeWhenManyWriteThemAtOnce) {
  const ScratchFolder folder;
  const std::string path = folder.path("run.json");
  constexpr int kWriters = 8;
  constexpr std::size_t kSize = 200'000;
  std::vector<pid_t> writers;
  for (int i = 0; i < kWriters; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      bool good = true;
      for (int k = 0; k < 20; ++k)
        good = write_file(path, std::string(kSize, static_cast<char>('a' + i))).has_value() && good;
      ::_exit(good ? 0 : 1);
    }
    writers.push_back(child);
  }
  for (const pid_t writer : writers) {
    int status = 0;
    ASSERT_EQ(::waitpid(writer, &status, 0), writer);
    EXPECT_EQ(status, 0) << "every write succeeds";
  }
  const std::string text = read_text(path);
  ASSERT_EQ(text.size(), kSize);
  EXPECT_EQ(text, std::string(kSize, text[0]));
  EXPECT_EQ(folder.entries(), Names{"run.json"});
}

TEST(WrittenFiles, thatCannotBeWrittenSayWhyAndLeaveNothing) {
  const ScratchFolder folder;
  const auto why = [&](const std::string& name) {
    const Result<void> written = write_file(folder.path(name), "x");
    EXPECT_FALSE(written);
    if (written) return std::string();
    EXPECT_EQ(written.error().status, kExitEnvironment);
    return written.error().text.substr(folder.path(name).size());
  };
  EXPECT_EQ(why("missing/run.json"), ": cannot be written: No such file or directory");
  fs::create_directory(folder.path("folder"));
  EXPECT_EQ(why("folder"), ": cannot be written: Is a directory");
  EXPECT_EQ(why(std::string(300, 'x')), ": cannot be written: File name too long");
  EXPECT_EQ(folder.entries(), Names{"folder"});
}

// --- Reading -------------------------------------------------------------------------------------

TEST(OpenedInputs, areRegularFilesOfText) {
  const ScratchFolder folder;
  const auto why = [&](const std::string& name) {
    const Result<std::ifstream> file = open_input(folder.path(name));
    return file ? "" : file.error().text.substr(folder.path(name).size());
  };
  ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
  EXPECT_EQ(why("pipe"), ": is a pipe or a device; save what it gives in a file and name that");
  EXPECT_EQ(why(""), ": is a folder, not a file");
  EXPECT_EQ(why("absent"), ": cannot be read: No such file or directory");
  folder.write("packed", "\x1F\x8B\x08");
  EXPECT_EQ(why("packed"), ": is compressed with gzip; unpack it, or compress it with zstd");
  for (const char* const mark : {"\xEF\xBB\xBF{", "\xFF\xFE{", "\xFE\xFF"}) {
    folder.write("marked", mark);
    EXPECT_EQ(why("marked"), ": begins with a byte order mark; save it as UTF-8 without one");
  }
  fs::create_symlink("plain", folder.path("link"));
  for (const char* const text : {"", "\xEF", "check\n"}) {
    folder.write("plain", text);
    Result<std::ifstream> file = open_input(folder.path("link"));
    ASSERT_TRUE(file);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(*file), {}), text);
  }
}

// --- Text ----------------------------------------------------------------------------------------

TEST(PrintableText, isUtf8WithoutControlCharacters) {
  for (const char* const text : {"", "plain", "a\tb\n", "µ – ✓ 漢字 \xF0\x9F\x98\x80"})
    EXPECT_EQ(printable(text), text);
  EXPECT_EQ(printable("\x1B[31mred"), "\\x1b[31mred");
  EXPECT_EQ(printable("a\rb\x7F"), "a\\x0db\\x7f");
  EXPECT_EQ(printable("\xC2\x9B"
                      "31m"),
            "\\xc2\\x9b31m")
      << "C1 in UTF-8";
  EXPECT_EQ(printable("\x9B"
                      "31m"),
            "\\x9b31m")
      << "C1 in Latin-1";
  EXPECT_EQ(printable("\xC2\xA0"), "\xC2\xA0") << "after C1";
  for (const char* const bad :
       {"\xC3", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF5\x80\x80\x80", "\xF4\x90\x80\x80",
        "\xF0\x80\x80\x80", "\xE2\x82"})
    EXPECT_EQ(printable(bad).find_first_not_of("\\x0123456789abcdef"), std::string::npos) << bad;
  EXPECT_EQ(printable("\xE2\x82z"), "\\xe2\\x82z") << "what follows is kept";
}

}  // namespace
}  // namespace lockstep::cache_sim
