# The clients' side of napi-wait.sh: while a file 'flood' exists, sends datagrams of 16 bytes to the bulk NIC at the
# highest possible rate.
while sleep 0.1; do
    [ -e flood ] || continue
    perl -e 'use Socket; socket(my $s, PF_INET, SOCK_DGRAM, 0); my $to = pack_sockaddr_in(9, inet_aton("10.2.0.9"));
        for (my $n = 0; ; $n++) { send $s, "x" x 16, 0, $to; last if $n % 1000 == 0 && !-e "flood" }'
done
