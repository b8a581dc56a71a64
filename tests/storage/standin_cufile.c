/* A libcufile.so.0 for machines without GPUDirect Storage: host memory goes to and from the registered descriptor. It
   keeps the real one's rules, and does what these variables of the environment say, which each call reads anew:
   STANDIN_NO_GDS (files have no GPUDirect Storage), STANDIN_SHORT (each move ends so many bytes early), STANDIN_ERROR
   (each move fails: an errno above 0, an error of cuFile below), STANDIN_NO_PINNING (no memory can be registered),
   STANDIN_DRIVER (an error of cuFile with which the driver does not open), STANDIN_VERSION (one in place of it). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { int err, cu_err; } Error;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } Descr;
enum { ALLOW_COMPAT_MODE = 1, FORCE_COMPAT_MODE = 2, MAX = 64 };
enum { ALREADY_OPEN = 5026, IO_NOT_SUPPORTED = 5008, INVALID_FILE_TYPE = 5018, DIO_NOT_SET = 5020,
       MEMORY_ALREADY_REGISTERED = 5023, MEMORY_NOT_REGISTERED = 5024, HANDLE_NOT_REGISTERED = 5027,
       GPU_MEMORY_PINNING_FAILED = 5036 };

/* What the tests look at; a slot is taken while it is not 0. */
int standin_opened, standin_files[MAX];
bool standin_allow_compat_mode = true, standin_force_compat_mode = true;
const void *standin_buffers[MAX];

static int told(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
static Error answer(int code) { return (Error){code, 0}; }
static bool is_compat(void) { return standin_allow_compat_mode || standin_force_compat_mode; }

Error cuFileGetVersion(int *version) { *version = 1160; return answer(told("STANDIN_VERSION")); }
const char *cufileop_status_error(int code) { (void)code; return "words of the stand-in"; }

Error cuFileSetParameterBool(int name, bool value) {
  if (standin_opened) return answer(ALREADY_OPEN);
  if (name == ALLOW_COMPAT_MODE) standin_allow_compat_mode = value;
  if (name == FORCE_COMPAT_MODE) standin_force_compat_mode = value;
  return answer(0);
}
Error cuFileGetParameterBool(int name, bool *value) {
  *value = (name == ALLOW_COMPAT_MODE && standin_allow_compat_mode) ||
           (name == FORCE_COMPAT_MODE && standin_force_compat_mode);
  return answer(0);
}
Error cuFileDriverOpen(void) {
  if (told("STANDIN_DRIVER")) return answer(told("STANDIN_DRIVER"));
  standin_opened++;
  return answer(0);
}

Error cuFileHandleRegister(void **handle, Descr *descr) {
  bool is_direct = fcntl(descr->handle.fd, F_GETFL) & O_DIRECT, has_gds = !getenv("STANDIN_NO_GDS");
  char path[64];
  if (descr->type != 1) return answer(INVALID_FILE_TYPE);
  if (!is_compat() && !is_direct) return answer(DIO_NOT_SET);
  if (!is_compat() && !has_gds) return answer(IO_NOT_SUPPORTED);
  snprintf(path, sizeof path, "/proc/self/fd/%d", descr->handle.fd);
  for (int i = 0; i < MAX; i++) {
    if (standin_files[i]) continue;
    standin_files[i] = open(path, O_RDWR | O_CLOEXEC); /* not direct: any address will do, as on a card */
    *handle = &standin_files[i];
    return answer(standin_files[i] > 0 ? 0 : IO_NOT_SUPPORTED);
  }
  abort();
}
void cuFileHandleDeregister(void *handle) { close(*(int *)handle); *(int *)handle = 0; }

static const void **slot(const void *buffer) {
  for (int i = 0; i < MAX; i++) if (standin_buffers[i] == buffer) return &standin_buffers[i];
  return NULL;
}
Error cuFileBufRegister(const void *buffer, size_t nbytes, int flags) {
  (void)nbytes, (void)flags;
  if (getenv("STANDIN_NO_PINNING")) return answer(GPU_MEMORY_PINNING_FAILED);
  if (slot(buffer)) return answer(MEMORY_ALREADY_REGISTERED);
  *slot(NULL) = buffer;
  return answer(0);
}
Error cuFileBufDeregister(const void *buffer) {
  if (!slot(buffer)) return answer(MEMORY_NOT_REGISTERED);
  *slot(buffer) = NULL;
  return answer(0);
}

static ssize_t move(void *handle, char *buffer, size_t nbytes, off_t at, off_t start, bool is_write) {
  int code = told("STANDIN_ERROR");
  size_t done = 0, end = nbytes - told("STANDIN_SHORT");
  if (!*(int *)handle) return -HANDLE_NOT_REGISTERED;
  if (code > 0) { errno = code; return -1; }
  if (code < 0) return code;
  while (done < end) {
    ssize_t moved = is_write ? pwrite(*(int *)handle, buffer + start + done, end - done, at + done)
                             : pread(*(int *)handle, buffer + start + done, end - done, at + done);
    if (moved < 0) return -1;
    if (!moved) break;
    done += moved;
  }
  return done;
}
ssize_t cuFileRead(void *handle, void *buffer, size_t nbytes, off_t at, off_t start) {
  return move(handle, buffer, nbytes, at, start, false);
}
ssize_t cuFileWrite(void *handle, const void *buffer, size_t nbytes, off_t at, off_t start) {
  return move(handle, (char *)buffer, nbytes, at, start, true);
}
