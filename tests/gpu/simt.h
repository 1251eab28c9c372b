// CUDA kernels on the host, thread by thread: enough of the language to compile our kernels' very sources with g++.
//
// Every CUDA thread is a fiber. One runs until it meets others (a barrier, a warp's ballot or shuffle) or waits for
// memory (__nanosleep); then the scheduler picks a fiber that can go on, among the blocks that are resident: at random
// by a seed, or, in every other launch, always one of the first, so that whoever misses a barrier is overtaken. So
// blocks overlap and overtake one another as on a device, whose memory, though, is weaker than the host's. A launch in
// which no fiber can go on, or all wait for memory that nobody writes, fails instead of hanging.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <setjmp.h>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED(Type, name) Type &name = *static_cast<Type *>(simt::shared_memory(sizeof(Type)))

namespace simt {

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 64 << 10;
constexpr unsigned PATIENCE = 1'000'000;    // pauses of fibers that wait for memory, with nothing else under way

struct Index { unsigned x; };
enum class State { READY, AT_BARRIER, IN_WARP, DONE };

struct Block;

struct Thread {
    Block *block;
    Index index;
    State state = State::READY;
    unsigned operation = 0;             // which of the warp's operations it has met, to catch lanes that diverge
    unsigned deposit = 0;               // what it brings to one
    jmp_buf context;
    std::unique_ptr<char[]> stack;      // none until it runs
};

struct Block {
    Index index;
    std::vector<Thread> threads;
    std::vector<unsigned> seen;         // what each lane brought to its warp's last operation
    std::unique_ptr<char[]> shared;
    std::size_t shared_size = 0;
    unsigned waiting = 0, done = 0;     // at the barrier; finished
};

inline Thread *current;
inline jmp_buf scheduler;
inline Index grid_size, block_size;
inline std::function<void()> kernel;
inline bool failed;
inline bool skewed;                         // the first threads that can, go on: they get as far ahead as can be
inline unsigned pauses;                     // since anything else happened

inline void fail(const char *why) {
    if (!failed) std::fprintf(stderr, "emulated kernel: %s\n", why);
    failed = true;
}

inline void *shared_memory(std::size_t size) {
    Block &block = *current->block;
    if (!block.shared) {
        block.shared.reset(new char[size]);
        std::fill_n(block.shared.get(), size, char(0xA5));  // nobody may count on zeros
        block.shared_size = size;
    }
    if (block.shared_size != size) fail("one shared structure a kernel");
    return block.shared.get();
}

// swapcontext would ask the kernel for the signal mask at every switch.
inline void to_scheduler() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

inline void yield() {
    pauses = 0;
    to_scheduler();
}

inline void pause() {
    if (++pauses > PATIENCE) fail("threads wait for memory that nobody writes");
    to_scheduler();
}

inline void barrier() {
    Thread &self = *current;
    self.state = State::AT_BARRIER;
    Block &block = *self.block;
    if (++block.waiting == block.threads.size() - block.done) {
        block.waiting = 0;
        for (Thread &thread : block.threads)
            if (thread.state == State::AT_BARRIER) thread.state = State::READY;
    }
    yield();
}

// Every lane brings a word; all of them see all 32. The last to come wakes the others.
inline const unsigned *exchange(unsigned mask, unsigned word, unsigned operation) {
    Thread &self = *current;
    Block &block = *self.block;
    if (mask != 0xFFFFFFFFu || block.threads.size() % WARP) fail("a warp's operation needs whole warps");
    const unsigned first = self.index.x / WARP * WARP;
    self.deposit = word;
    self.operation = operation;
    self.state = State::IN_WARP;
    bool complete = true;
    for (unsigned lane = 0; lane < WARP && complete; lane++) complete = block.threads[first + lane].state == State::IN_WARP;
    for (unsigned lane = 0; lane < WARP && complete; lane++)
        if (block.threads[first + lane].operation != operation) fail("the lanes of a warp meet in different operations");
    if (complete)
        for (unsigned lane = 0; lane < WARP; lane++) {
            block.seen[first + lane] = block.threads[first + lane].deposit;
            block.threads[first + lane].state = State::READY;
        }
    else
        yield();
    return &block.seen[first];
}

inline void fiber() {
    kernel();
    current->state = State::DONE;
    Block &block = *current->block;
    block.done++;
    if (block.waiting && block.waiting == block.threads.size() - block.done) fail("a thread left before a barrier");
    yield();
}

// Let a fiber run, until it yields.
inline void run(Thread &thread) {
    current = &thread;
    if (_setjmp(scheduler)) return;
    if (thread.stack) _longjmp(thread.context, 1);
    ucontext_t context;
    getcontext(&context);
    thread.stack.reset(new char[STACK]);
    context.uc_stack.ss_sp = thread.stack.get();
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, fiber, 0);
    setcontext(&context);
}

inline std::unique_ptr<Block> start(unsigned index) {
    auto block = std::make_unique<Block>();
    block->index.x = index;
    block->threads.resize(block_size.x);
    block->seen.resize(block_size.x);
    for (unsigned at = 0; at < block_size.x; at++) {
        Thread &thread = block->threads[at];
        thread.block = block.get();
        thread.index.x = at;
    }
    return block;
}

// Let a fiber of a random resident block run, and after it its neighbours: a warp mostly runs together.
inline bool run_some(std::vector<std::unique_ptr<Block>> &resident, std::mt19937 &random) {
    const unsigned first = unsigned(random() % resident.size());
    for (unsigned turn = 0; turn < resident.size(); turn++) {
        Block &block = *resident[(first + turn) % resident.size()];
        const unsigned count = unsigned(block.threads.size()), from = skewed ? 0 : unsigned(random() % count);
        bool ran = false;
        for (unsigned step = 0; step < count && (!ran || step < WARP); step++) {
            Thread &thread = block.threads[(from + step) % count];
            if (thread.state != State::READY) continue;
            run(thread);
            ran = true;
        }
        if (ran) return true;
    }
    return false;
}

// 0 where every thread came to its end. `resident` blocks are under way at a time, started in a random order.
inline int launch(unsigned grid, unsigned block, unsigned resident, unsigned seed, std::function<void()> body) {
    std::mt19937 random(seed);
    grid_size.x = grid;
    block_size.x = block;
    kernel = std::move(body);
    failed = false;
    skewed = random() % 2;
    pauses = 0;
    std::vector<unsigned> order(grid);
    for (unsigned at = 0; at < grid; at++) order[at] = at;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::unique_ptr<Block>> running;
    while ((!order.empty() || !running.empty()) && !failed) {
        while (running.size() < resident && !order.empty()) {
            running.push_back(start(order.back()));
            order.pop_back();
        }
        if (!run_some(running, random)) fail("no thread can go on: they wait for one another");
        for (std::size_t at = 0; at < running.size(); at++)
            if (running[at]->done == block) {
                running.erase(running.begin() + std::ptrdiff_t(at));
                break;
            }
    }
    return failed ? 1 : 0;
}

// As a launch on a device takes them: a pointer to every argument.
template <class... Parameters, std::size_t... Number>
int launch_with(
    void (*function)(Parameters...), void **arguments, unsigned grid, unsigned block, unsigned resident, unsigned seed,
    std::index_sequence<Number...>) {
    std::tuple<std::decay_t<Parameters>...> values(*static_cast<std::decay_t<Parameters> *>(arguments[Number])...);
    return launch(grid, block, resident, seed, [&] { std::apply(function, values); });
}

template <class... Parameters>
int launch_kernel(
    void (*function)(Parameters...), void **arguments, unsigned grid, unsigned block, unsigned resident,
    unsigned seed) {
    return launch_with(
        function, arguments, grid, block, resident, seed, std::make_index_sequence<sizeof...(Parameters)>());
}

}  // namespace simt

#define threadIdx (simt::current->index)
#define blockIdx (simt::current->block->index)
#define blockDim (simt::block_size)
#define gridDim (simt::grid_size)

#define ON_HOST(name)                                                                                             \
    extern "C" int on_host_##name(                                                                                \
        void **arguments, unsigned grid, unsigned block, unsigned resident, unsigned seed) {                      \
        return simt::launch_kernel(name, arguments, grid, block, resident, seed);                                 \
    }

inline void __syncthreads() { simt::barrier(); }
inline void __nanosleep(unsigned) { simt::pause(); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }

inline unsigned __ballot_sync(unsigned mask, bool holds) {
    const unsigned *lanes = simt::exchange(mask, holds, 1);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < simt::WARP; lane++) bits |= lanes[lane] << lane;
    return bits;
}

template <class Word> Word __shfl_sync(unsigned mask, Word value, unsigned from) {
    static_assert(sizeof(Word) == sizeof(unsigned));
    const unsigned *lanes = simt::exchange(mask, __builtin_bit_cast(unsigned, value), 3);
    return __builtin_bit_cast(Word, lanes[from % simt::WARP]);
}

template <class Word> Word __shfl_xor_sync(unsigned mask, Word value, unsigned distance) {
    static_assert(sizeof(Word) == sizeof(unsigned));
    const unsigned *lanes = simt::exchange(mask, __builtin_bit_cast(unsigned, value), 2);
    return __builtin_bit_cast(Word, lanes[threadIdx.x % simt::WARP ^ distance]);
}

inline unsigned atomicAdd(unsigned *word, unsigned value) { return std::exchange(*word, *word + value); }
inline unsigned atomicMax(unsigned *word, unsigned value) { return std::exchange(*word, std::max(*word, value)); }
inline unsigned atomicMin(unsigned *word, unsigned value) { return std::exchange(*word, std::min(*word, value)); }
inline unsigned atomicOr(unsigned *word, unsigned value) { return std::exchange(*word, *word | value); }
