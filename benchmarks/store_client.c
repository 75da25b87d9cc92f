// One client in C: sends a command and reads its reply, again and again, with a number in it that counts up.
//
// Arguments: port, seconds, length of the login, length of the command, where the number begins in it (0: there is none),
// its digits. Standard input: login, command, and a byte when to begin. Standard output: a byte once it is connected,
// then how often it has done it.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int server;
static char reply[65536];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void ask(const char *command, size_t length) {
  if (write(server, command, length) != (ssize_t)length || read(server, reply, sizeof reply) <= 0 || *reply == '-')
    exit(1);  // a short reply comes in one piece
}

static void get_input(char *to, size_t length) {
  for (ssize_t n; length; to += n, length -= n)
    if ((n = read(0, to, length)) <= 0) exit(2);
}

int main(int argc, char **argv) {
  if (argc != 7) return 3;
  double seconds = atof(argv[2]);
  size_t login_length = atoi(argv[3]), length = atoi(argv[4]), number = atoi(argv[5]), digits = atoi(argv[6]);
  char login[login_length], command[length], go;
  get_input(login, login_length);
  get_input(command, length);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  server = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
  if (connect(server, (struct sockaddr *)&address, sizeof address)) return 4;
  ask(login, login_length);
  if (write(1, "+", 1) != 1) return 5;
  get_input(&go, 1);
  long done = 0;
  for (double ends = now() + seconds; now() < ends; done++) {
    ask(command, length);
    for (size_t i = number + digits; number && i-- > number && ++command[i] > '9';) command[i] = '0';
  }
  printf("%ld\n", done);
}
