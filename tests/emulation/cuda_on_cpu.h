// Test equipment: enough of CUDA for our kernels to run on a CPU, one fiber a thread, one block after the other.
//
// A fiber runs until it reaches a barrier or a shuffle, so a launch is deterministic and every exchange between threads
// goes through the rules below. What it finds: wrong results on any shape, a barrier that not all threads reach, a
// shuffle without its whole warp, misaligned vectors. A missing barrier shows in one of the two orders of warps, so run
// both.
//
// Compiled with `-fsanitize=thread` it finds races too: every thread is a fiber of ThreadSanitizer, to which a barrier is
// the only order between threads of a block. A shuffle is none: lanes that exchange values exchange no memory. Blocks run
// one after the other, so races between blocks are not seen.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __shared__ static

// ---- number formats: rounding to nearest even, as the hardware's conversions ------------------------------------------

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
static inline unsigned bits_of(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
static inline float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
static inline void narrow(float f, bf16& x) {
  const unsigned u = bits_of(f);
  x.bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
}
static inline float widen(fp16 x) {
  _Float16 h;
  memcpy(&h, &x.bits, 2);
  return (float)h;
}
static inline void narrow(float f, fp16& x) {
  const _Float16 h = (_Float16)f;
  memcpy(&x.bits, &h, 2);
}


struct e4m3 { enum { MANTISSA = 3, BIAS = 7, LARGEST = 0x7e }; unsigned char bits; };  // 448; NaN is 0x7f
struct e5m2 { enum { MANTISSA = 2, BIAS = 15, LARGEST = 0x7b }; unsigned char bits; };  // 57344; then infinity, NaN
template <typename F> inline unsigned narrow_one(float f) {  // a number beyond the largest value becomes that
  const unsigned sign = bits_of(f) >> 24 & 0x80, u = bits_of(f) & 0x7fffffffu, cut = 23 - F::MANTISSA;
  if (u > 0x7f800000u) return 0x7f;
  unsigned bits;
  if (u < (128u - F::BIAS) << 23) bits = (unsigned)std::nearbyint(std::ldexp(std::fabs(f), F::BIAS - 1 + F::MANTISSA));
  else bits = ((u + (1u << (cut - 1)) - 1 + (u >> cut & 1)) >> cut) - ((127u - F::BIAS) << F::MANTISSA);
  return sign | (bits < F::LARGEST ? bits : F::LARGEST);
}
template <typename F> inline unsigned narrow_two(float low, float high) {
  return narrow_one<F>(low) | narrow_one<F>(high) << 8;
}

static inline unsigned __float_as_uint(float f) { return bits_of(f); }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned atomicMax(unsigned* at, unsigned x) {
  unsigned old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, max(old, x), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}
static inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
static inline float emulated_exp(float x) { return std::exp(x); }
#define __expf emulated_exp  // glibc has names like these of its own

// ---- threads ----------------------------------------------------------------------------------------------------------

struct Index { unsigned x, y, z; };

namespace emulation {

enum State : uint8_t { RUNNING, AT_BLOCK_BARRIER, AT_WARP_BARRIER, FINISHED };

// What ThreadSanitizer is told. Without it, nothing.
#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_create_fiber(unsigned);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define UNCHECKED __attribute__((no_sanitize("thread")))  // the emulation itself
#else
#define UNCHECKED
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#endif
// Who waits at a barrier releases its object and then acquires it. Two of each, in turn: a thread that goes on may reach
// the next barrier before another has left this one.
static char block_barriers[2], warp_barriers[2][32], block_begin, block_end;
static std::vector<void*> checked_fibers;  // by number; they are kept, for each costs much memory
static void* checked_main;

struct Fiber {
  void* stack_pointer;
  Index index;
  int number;
  State state;
  uint64_t offered[2];  // in a shuffle; two, so that one barrier separates one shuffle from the next
  unsigned shuffles, block_turn, warp_turn;
};

constexpr size_t STACK = 64 * 1024;

// Set by what calls a launch, to fill shared memory with NaN: a block must not find anything there.
static void (*forget_shared)() = nullptr;
UNCHECKED inline void forget_shared_memory() {
  if (forget_shared) forget_shared();
}

struct Launch {
  std::vector<Fiber> fibers;
  char* stacks = nullptr;
  size_t stack_count = 0;
  Fiber* current = nullptr;
  void* main_stack_pointer = nullptr;
  Index block{}, block_size{}, grid_size{};
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  bool reversed = false;
  char error[200] = "";
  jmp_buf failed;
};
static Launch launch_state;  // one launch at a time

[[noreturn]] inline void fail(const char* message) {
  snprintf(launch_state.error, sizeof launch_state.error, "%s (block %u)", message, launch_state.block.x);
#ifdef __SANITIZE_THREAD__
  fprintf(stderr, "%s\n", launch_state.error);  // ThreadSanitizer does not know which stack it would jump to
  _Exit(65);
#endif
  longjmp(launch_state.failed, 1);
}

extern "C" void emulation_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.type emulation_switch,@function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void* fresh_stack(char* top, void (*entry)()) {
  void** at = (void**)((uintptr_t)top & ~uintptr_t(15));
  *--at = nullptr;  // keeps the stack aligned as after a call
  *--at = (void*)entry;
  for (int saved = 0; saved < 6; ++saved) *--at = nullptr;
  return at;
}
#elif defined(__aarch64__)
asm(R"(
.text
emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
inline void* fresh_stack(char* top, void (*entry)()) {
  void** at = (void**)(((uintptr_t)top & ~uintptr_t(15)) - 160);
  memset(at, 0, 160);
  at[11] = (void*)entry;  // where it returns to
  return at;
}
#else
#error "no context switch for this processor"
#endif

// Stop this fiber until the scheduler lets it go on; `barrier`: memory is in order among those who wait, if there is one.
UNCHECKED inline void wait(State state, void* barrier) {
  Fiber* self = launch_state.current;
  self->state = state;
  if (barrier) __tsan_release(barrier);
  __tsan_switch_to_fiber(checked_main, 1);
  emulation_switch(&self->stack_pointer, launch_state.main_stack_pointer);
  if (barrier) __tsan_acquire(barrier);
}

UNCHECKED inline void wait_for_block() {
  wait(AT_BLOCK_BARRIER, &block_barriers[launch_state.current->block_turn++ & 1]);
}

UNCHECKED inline void wait_for_warp() {
  Fiber* self = launch_state.current;
  wait(AT_WARP_BARRIER, &warp_barriers[self->warp_turn++ & 1][self->number / 32]);
}

UNCHECKED inline void enter() {
  __tsan_acquire(&block_begin);
  launch_state.kernel(launch_state.arguments);
  wait(FINISHED, &block_end);
}

// Run a warp until all of it waits for the block or has finished; true if any of it ran.
UNCHECKED inline bool run_warp(int first, int end, int& alive) {
  bool moved = false;
  for (;;) {
    int at_warp_barrier = 0, live = 0;
    for (int i = first; i < end; ++i) {
      Fiber& fiber = launch_state.fibers[i];
      if (fiber.state == RUNNING) {
        launch_state.current = &fiber;
        __tsan_switch_to_fiber(checked_fibers[i], 1);
        emulation_switch(&launch_state.main_stack_pointer, fiber.stack_pointer);
        moved = true;
        alive -= fiber.state == FINISHED;
      }
      at_warp_barrier += fiber.state == AT_WARP_BARRIER;
      live += fiber.state != FINISHED;
    }
    if (!at_warp_barrier) return moved;
    if (at_warp_barrier != live) fail("a shuffle was not reached by all live threads of its warp");
    for (int i = first; i < end; ++i)
      if (launch_state.fibers[i].state == AT_WARP_BARRIER) launch_state.fibers[i].state = RUNNING;
  }
}

UNCHECKED inline void run_block() {
  Launch& at = launch_state;
  __tsan_release(&block_begin);
  const int count = (int)at.fibers.size();
  for (int i = 0; i < count; ++i)  // staggered stacks, or all of them would share a few cache lines
    at.fibers[i] = {fresh_stack(at.stacks + (i + 1) * STACK - (i & 31) * 192, enter), {(unsigned)i, 0, 0}, i, RUNNING};
  for (int alive = count; alive > 0;) {
    bool moved = false;
    const int warps = (count + 31) / 32;
    for (int w = 0; w < warps; ++w) {
      const int warp = at.reversed ? warps - 1 - w : w;
      moved |= run_warp(warp * 32, warp * 32 + 32 < count ? warp * 32 + 32 : count, alive);
    }
    int waiting = 0;
    for (Fiber& fiber : at.fibers) waiting += fiber.state == AT_BLOCK_BARRIER;
    if (waiting && waiting != count) fail("a barrier was not reached by all threads of the block");
    for (Fiber& fiber : at.fibers)
      if (fiber.state == AT_BLOCK_BARRIER) fiber.state = RUNNING;
    if (!moved && alive) fail("no thread can go on");
  }
  __tsan_acquire(&block_end);
}

UNCHECKED inline void copy(void* to, const void* from, size_t bytes) {  // ThreadSanitizer follows memcpy everywhere
  for (size_t i = 0; i < bytes; ++i) ((volatile char*)to)[i] = ((const volatile char*)from)[i];
}

template <class V> UNCHECKED V shuffle(V value, int source) {
  static_assert(sizeof(V) <= 8, "too large for a shuffle");
  Fiber* self = launch_state.current;
  const unsigned turn = self->shuffles++ & 1;
  copy(&self->offered[turn], &value, sizeof(V));
  wait(AT_WARP_BARRIER, nullptr);
  const int from = (self->number & ~31) + source;
  if (source >= 0 && source < 32 && from < (int)launch_state.fibers.size())
    copy(&value, &launch_state.fibers[from].offered[turn], sizeof(V));
  return value;
}

template <class... A, size_t... I> void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

}  // namespace emulation

#define threadIdx (emulation::launch_state.current->index)
#define blockIdx (emulation::launch_state.block)
#define blockDim (emulation::launch_state.block_size)
#define gridDim (emulation::launch_state.grid_size)
#define CHECK_ALIGNED(p, bytes) if ((uintptr_t)(p) % (bytes)) emulation::fail("a vector that is not aligned")

UNCHECKED static inline int emulated_lane() { return emulation::launch_state.current->number & 31; }
static inline void __syncthreads() { emulation::wait_for_block(); }
static inline void __syncwarp(unsigned = ~0u) { emulation::wait_for_warp(); }
template <class V> V __shfl_sync(unsigned, V v, int lane) { return emulation::shuffle(v, lane & 31); }
template <class V> V __shfl_xor_sync(unsigned, V v, int mask) { return emulation::shuffle(v, emulated_lane() ^ mask); }
template <class V> V __shfl_down_sync(unsigned, V v, int by) {
  return emulation::shuffle(v, emulated_lane() + by < 32 ? emulated_lane() + by : emulated_lane());
}

// What Python calls: the kernel's name with "emulated_" in front. Returns what went wrong, or null.
#define EMULATE(name)                                                                                                  \
  extern "C" __attribute__((visibility("default"))) const char* emulated_##name(                                      \
      unsigned blocks, unsigned threads, int reversed, int count, void** arguments) {                                 \
    return emulation::run(&name, blocks, threads, reversed, count, arguments,                                         \
                          [](void** given) { emulation::call_of(&name, given); });                                    \
  }

namespace emulation {
template <class... A> void call_of(void (*kernel)(A...), void** given) {
  call(kernel, given, std::index_sequence_for<A...>{});
}
template <class... A>
UNCHECKED const char* run(void (*)(A...), unsigned blocks, unsigned threads, int reversed, int count, void** arguments,
                void (*kernel)(void**)) {
  Launch& at = launch_state;
  if (setjmp(at.failed)) return at.error;
  if (count != sizeof...(A)) fail("a wrong number of arguments");
  if (threads == 0 || threads > 1024) fail("a wrong number of threads");
  at.block_size = {threads, 1, 1};
  at.grid_size = {blocks, 1, 1};
  at.fibers.resize(threads);
  if (at.stack_count < threads) {
    free(at.stacks);
    at.stacks = (char*)aligned_alloc(4096, threads * STACK);
    at.stack_count = threads;
  }
  at.kernel = kernel;
  at.arguments = arguments;
  at.reversed = reversed;
  checked_main = __tsan_get_current_fiber();
  while (checked_fibers.size() < threads) checked_fibers.push_back(__tsan_create_fiber(0));
  for (unsigned block = 0; block < blocks; ++block) {
    at.block = {block, 0, 0};
    forget_shared_memory();
    run_block();
  }
  return nullptr;
}
}  // namespace emulation
