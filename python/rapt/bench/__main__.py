from rapt.bench import main

main()
