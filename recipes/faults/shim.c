/* Faults below the process: stands in front of the C library's reads, writes and preallocation of O_DIRECT files.
 *
 * Built by recipes/faults/shim.py and loaded by LD_PRELOAD. Does nothing before fault_arm() is called, and nothing to
 * files that were opened without O_DIRECT. The same seed makes the same decision for the same number of call.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

enum { NOTHING, FAIL, SHORT, INTERRUPT, SLOW };
enum { READ = 1, WRITE = 2, ALLOCATE = 4 };
#define SECTOR 512

static atomic_int kind, directions, code;
static atomic_uint one_in, delay_us;
static atomic_ullong seed, calls, injected;

void fault_arm(int kind_, int directions_, unsigned one_in_, int code_, unsigned delay_us_, uint64_t seed_)
{
    atomic_store(&kind, NOTHING);
    atomic_store(&directions, directions_);
    atomic_store(&one_in, one_in_ ? one_in_ : 1);
    atomic_store(&code, code_);
    atomic_store(&delay_us, delay_us_);
    atomic_store(&seed, seed_);
    atomic_store(&calls, 0);
    atomic_store(&injected, 0);
    atomic_store(&kind, kind_);
}

void fault_disarm(void) { atomic_store(&kind, NOTHING); }

uint64_t fault_count(void) { return atomic_load(&injected); }

static uint64_t mix(uint64_t x) /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Which fault this call gets; *dice are random bits for it. */
static int strike(int fd, int direction, uint64_t *dice)
{
    int wanted = atomic_load(&kind), saved = errno, flags;
    if (wanted == NOTHING || !(atomic_load(&directions) & direction))
        return NOTHING;
    flags = fcntl(fd, F_GETFL);
    errno = saved;
    if (flags == -1 || !(flags & O_DIRECT))
        return NOTHING;
    *dice = mix(atomic_load(&seed) ^ mix(atomic_fetch_add(&calls, 1)));
    if (*dice % atomic_load(&one_in))
        return NOTHING;
    *dice = mix(*dice);
    atomic_fetch_add(&injected, 1);
    return wanted;
}

/* Do what a call that moves nothing shall do; returns whether the call is over, with errno set. */
static int stumble(int fault, uint64_t dice)
{
    if (fault == SLOW) {
        uint64_t us = dice % ((uint64_t)atomic_load(&delay_us) + 1);
        struct timespec pause = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
        int saved = errno;
        nanosleep(&pause, 0);
        errno = saved;
        return 0;
    }
    if (fault == FAIL || fault == INTERRUPT) {
        errno = fault == FAIL ? atomic_load(&code) : EINTR;
        return 1;
    }
    return 0;
}

static size_t shorter(size_t nbytes, uint64_t dice)
{
    size_t sectors = nbytes / SECTOR;
    return sectors < 2 ? nbytes : (1 + dice % (sectors - 1)) * SECTOR;
}

#define REAL(type, name) \
    static type real; \
    if (!real) \
        real = (type)dlsym(RTLD_NEXT, #name)

/* A short call that the file system refuses for its size is made in full: then there was no fault. */
#define PLAIN(name, pointer, direction) \
    typedef ssize_t (*name##_t)(int, pointer, size_t, off64_t); \
    ssize_t name(int fd, pointer memory, size_t nbytes, off64_t offset) \
    { \
        uint64_t dice = 0; \
        int fault = strike(fd, direction, &dice); \
        REAL(name##_t, name); \
        if (stumble(fault, dice)) \
            return -1; \
        if (fault == SHORT) { \
            ssize_t moved = real(fd, memory, shorter(nbytes, dice), offset); \
            if (moved >= 0 || errno != EINVAL) \
                return moved; \
        } \
        return real(fd, memory, nbytes, offset); \
    }

#define VECTOR(name, direction, more, pass) \
    typedef ssize_t (*name##_t)(int, const struct iovec *, int, off64_t more); \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset more) \
    { \
        uint64_t dice = 0; \
        int fault = strike(fd, direction, &dice); \
        REAL(name##_t, name); \
        if (stumble(fault, dice)) \
            return -1; \
        if (fault == SHORT && count == 1) { \
            struct iovec part = {parts->iov_base, shorter(parts->iov_len, dice)}; \
            ssize_t moved = real(fd, &part, 1, offset pass); \
            if (moved >= 0 || errno != EINVAL) \
                return moved; \
        } \
        return real(fd, parts, count, offset pass); \
    }

#define FLAGS_TYPE , int flags
#define FLAGS , flags
#define NONE

PLAIN(pread, void *, READ)
PLAIN(pread64, void *, READ)
PLAIN(pwrite, const void *, WRITE)
PLAIN(pwrite64, const void *, WRITE)
VECTOR(preadv, READ, NONE, NONE)
VECTOR(preadv64, READ, NONE, NONE)
VECTOR(pwritev, WRITE, NONE, NONE)
VECTOR(pwritev64, WRITE, NONE, NONE)
VECTOR(preadv2, READ, FLAGS_TYPE, FLAGS)
VECTOR(preadv64v2, READ, FLAGS_TYPE, FLAGS)
VECTOR(pwritev2, WRITE, FLAGS_TYPE, FLAGS)
VECTOR(pwritev64v2, WRITE, FLAGS_TYPE, FLAGS)

typedef int (*fallocate_t)(int, int, off64_t, off64_t);
int fallocate(int fd, int mode, off64_t offset, off64_t nbytes)
{
    uint64_t dice = 0;
    int fault = strike(fd, ALLOCATE, &dice);
    REAL(fallocate_t, fallocate);
    return stumble(fault, dice) ? -1 : real(fd, mode, offset, nbytes);
}
