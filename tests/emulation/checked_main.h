// Test equipment: a program around one launch of an emulated kernel, for checks that cannot run inside of Python.
//
// It is compiled with `-fsanitize=thread`, see `cuda_on_cpu.h`. Beside races it finds reads and writes beyond the end of
// a tensor, where an unreadable page lies, and what a block reads in shared memory before it has written it: NaN.
//
// Standard input: the launch, see `main`. Standard output: the bytes of all buffers after it.
#include <sys/mman.h>
#include <unistd.h>
#include <dlfcn.h>

static int64_t take() {
  int64_t value;
  if (fread(&value, 8, 1, stdin) != 1) exit(64);
  return value;
}

// `size` bytes that end, but for less than 16, where an unreadable page begins; `offset` to the next multiple of 16.
static char* buffer_of(int64_t size, int64_t offset) {
  const int64_t page = sysconf(_SC_PAGESIZE), whole = (size + 32 + page - 1) / page * page;
  char* at = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(at + whole, page, PROT_NONE);
  const uintptr_t end = (uintptr_t)at + whole;
  uintptr_t start = ((end - size) & ~uintptr_t(15)) + offset;
  if (start + size > end) start -= 16;
  return (char*)start;
}

static std::vector<std::pair<int64_t, int64_t>> shared;  // variables in shared memory: place from `launch_state`, size

UNCHECKED static void fill_shared() {
  for (auto [place, size] : shared)
    for (int64_t i = 0; i < size; ++i) ((volatile char*)&emulation::launch_state)[place + i] = -1;
}

int main() {
  char name[64];
  if (fread(name, 64, 1, stdin) != 1) exit(64);
  const int64_t blocks = take(), threads = take(), reversed = take();
  shared.resize(take());
  for (auto& variable : shared) variable.first = take(), variable.second = take();
  std::vector<std::pair<char*, int64_t>> buffers(take());
  for (auto& [at, size] : buffers) {
    size = take();
    at = buffer_of(size, take());
    if (fread(at, 1, size, stdin) != (size_t)size) exit(64);
  }
  const int64_t count = take();  // of arguments: a buffer's number (-1: the value itself), and the value or a place in it
  std::vector<int64_t> values(count);
  std::vector<void*> arguments(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t buffer = take(), value = take();
    values[i] = buffer < 0 ? value : (int64_t)(buffers[buffer].first + value);
    arguments[i] = &values[i];
  }
  emulation::forget_shared = fill_shared;
  using Kernel = const char* (*)(unsigned, unsigned, int, int, void**);
  const char* error = ((Kernel)dlsym(RTLD_DEFAULT, name))(blocks, threads, reversed, count, arguments.data());
  if (error) fprintf(stderr, "%s\n", error), exit(65);
  for (auto& [at, size] : buffers) fwrite(at, 1, size, stdout);
}
